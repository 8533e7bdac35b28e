"""Command lines that the help of each command shows.

In: nothing. Out: `EXAMPLES`. Waits for nothing.
"""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "demo": ("forge-agents demo", "forge-agents demo --seed 1 --control_steps 0"),
    "init": ("forge-agents init my-team", "forge-agents init my-duel --template duel"),
    "train": (
        "forge-agents train train.yaml",
        "forge-agents train train.yaml --steps 200 --trainer.learner.lr 1e-5 --out_dir runs/second",
        "forge-agents train train.yaml --trainer.log_to wandb",
        "forge-agents train --env forge/Relay-v0 --policies.team.model smollm2-135m-instruct",
    ),
    "sft": (
        "forge-agents sft sums.yaml",
        "forge-agents sft --data chats.jsonl --policy.model smollm2-135m-instruct --out_dir runs/sft --epochs 3",
    ),
    "eval": ("forge-agents eval train.yaml", "forge-agents eval train.yaml --trainer.eval_episodes 256"),
    "export": ("forge-agents export runs/guess", "forge-agents export runs/guess --checkpoint newest --out guess"),
    "simulate": (
        "forge-agents simulate train.yaml --measured runs/measured",
        "forge-agents simulate train.yaml --measured runs/measured runs/async --trainer.max_staleness 1 --json",
        "forge-agents simulate train.yaml --measured runs/measured --gpus 64 --learner_gpus 16",
        "forge-agents simulate train.yaml --measured runs/measured --gpus 512 --sweep --price_per_gpu_hour 2.5",
    ),
    "bench": (
        "forge-agents bench --players.random random --suite duel-v0 --episodes 16",
        "forge-agents bench --players.before smollm2-135m-instruct --players.after runs/relay/export --html board.html",
    ),
    "leaderboard": ("forge-agents leaderboard mine/board.json theirs/board.json --html all.html",),
    "play": (
        "forge-agents play forge/KuhnPoker-v0",
        "forge-agents play forge/KuhnPoker-v0 --seat p1 --model smollm2-135m-instruct --sampling.temperature 0.7",
        "forge-agents play forge/Relay-v0 --endpoint http://127.0.0.1:8000/v1 --endpoint_model mine --api_key_env KEY",
        "forge-agents play forge/LeducPoker-v0 --opponent human --seed 3",
        "forge-agents play forge/Relay-v0 --env_args.max_number 9",
    ),
    "serve": (
        "forge-agents serve runs/guess",
        "forge-agents serve runs/duel --policy rival --port 8001",
        "FORGE_AGENTS_TOKEN=$(cat token) forge-agents serve smollm2-135m-instruct --kv_cache_gb 4",
        "forge-agents serve runs/guess -- --enable-auto-tool-choice --tool-call-parser hermes",
    ),
    "list": ("forge-agents list", "forge-agents list --tag zero-sum"),
    "check": ("forge-agents check forge/KuhnPoker-v0", "forge-agents check --all --tag 2p --json"),
    "verifiers": ("forge-agents verifiers report runs/sums --out verifiers.html",),
    "view": (
        "forge-agents view runs/guess",
        "forge-agents view runs/first runs/second",
        "forge-agents view runs/guess --out guess.html --episodes 50",
        "on another machine: ssh -L 8765:127.0.0.1:8765 HOST, then open the address that view printed there",
    ),
    "new-env": ("forge-agents new-env word-duel", "forge-agents new-env word-duel --out projects"),
    "download": ("forge-agents download Qwen/Qwen3-0.6B", "forge-agents download Qwen/Qwen3-0.6B --ignore '*.bin'"),
    "completion": (
        'bash: eval "$(forge-agents completion bash)" in ~/.bashrc',
        'zsh:  eval "$(forge-agents completion zsh)" in ~/.zshrc, after compinit',
        "fish: forge-agents completion fish > ~/.config/fish/completions/forge-agents.fish",
    ),
    "doctor": ("forge-agents doctor",),
}
"""By the command's name."""
