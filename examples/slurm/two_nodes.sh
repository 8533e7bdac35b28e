#!/bin/bash
#SBATCH --job-name=forge-agents
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --partition=gpu
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=04:00:00
#SBATCH --signal=B:TERM@300
# A host process on each node; the controller beside the first, whose node is the learner's. Everything ends with the
# job, and five minutes before its limit the run is told to write a checkpoint: submit again to go on.
set -eu
cd "${SLURM_SUBMIT_DIR:-.}"
bin=${FORGE_AGENTS_BIN:-.venv/bin}
port=26600

nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
for node in "${nodes[@]}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
        "$bin/python" -m forge_agents.runtime.host_process --address "tcp://$node:$port@tcp://0.0.0.0:$port" &
done

"$bin/forge-agents" train examples/slurm/train.yaml \
    --mesh.kind attach --mesh.partition "" --mesh.time_limit "" --mesh.slurm_args "[]" \
    --mesh.address "tcp://${nodes[0]}:$((port + 1))" \
    --mesh.workers "{\"learner\": [\"tcp://${nodes[0]}:$port\"], \"engines\": [\"tcp://${nodes[1]}:$port\"]}" &
trap 'kill -TERM %%' TERM
wait %% || wait %%
