"""A program that calls two models through OpenAI's client is trained unchanged, with a policy for each model name.

The program ``crew`` does not know that it is trained. Its planner solves a small sum and describes the result
in words. Its writer turns the words into digits. The team is rewarded if the number is right.

    python examples/plain_program.py [--steps 20] [--model smollm2-135m-instruct] [--out runs/plain_program]
"""

import argparse
import re

import forge_agents as fa


async def crew(task, client):
    """The program: two calls of two models, and what came of them."""

    async def ask(model, text):
        reply = await client.chat.completions.create(model=model, messages=[{"role": "user", "content": text}])
        return reply.choices[0].message.content

    plan = await ask("planner", f"{task['question']} Say it in a few words.")
    return await ask("writer", f"A friend says: {plan[:200]}\nWhich number does he mean? Reply with digits only.")


def tasks(rng):
    """A sum of two small numbers."""
    a, b = (int(n) for n in rng.integers(1, 5, 2))
    return {"question": f"What is {a} + {b}?", "answer": a + b}


def right(task, result):
    """1 where the first number of the answer is the sum."""
    number = re.search(r"\d+", result)
    return float(number is not None and number[0] == str(task["answer"]))


AGENTS = ("planner", "writer")
fa.register("my/Crew-v0", entry_point=fa.Program, program=crew, agents=AGENTS, tasks=tasks, reward=right)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--out", default="runs/plain_program")
    args = parser.parse_args(words)
    sampling = fa.Sampling(max_tokens=24)
    team = {agent: fa.Policy(args.model, name=agent, sampling=sampling, lora=fa.LoRA()) for agent in AGENTS}
    config = fa.GRPOConfig(learner=fa.LearnerConfig(lr=3e-4), engine=fa.EngineConfig(max_model_len=512))
    with fa.GRPOTrainer(team, config=config, out_dir=args.out) as trainer:
        print(trainer.fit("my/Crew-v0", steps=args.steps).curve)


if __name__ == "__main__":
    main()
