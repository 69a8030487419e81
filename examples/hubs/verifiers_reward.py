"""The tasks of a taskset of verifiers 0.4.0 as problems, and its own Task.score() on the conversation as the reward.

    TASKSET=my_taskset PYTHONPATH=scripts python3 examples/hubs/verifiers_reward.py 500 > problems.jsonl

    trainer: grpo
    data: {jsonl: {path: problems.jsonl}}
    rewards: [{name: command, run: env TASKSET=my_taskset python3 PATH/TO/cohort_reward.py verifiers_reward.py}]

my_taskset is an installed package, or a module beside this file. verifiers skips rewards that need a runtime; where it skips all
of them the reward does not apply. Its agents, which need an endpoint, are not used.
"""
import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from cohort_reward import conversational

TASKSET = vf.load_taskset(vf.taskset_config_type(os.environ["TASKSET"])(id=os.environ["TASKSET"]))


async def score(prompt, completion, data):
    task = TASKSET.task_type()(TASKSET.task_type().data_type().model_validate(data), TASKSET.config.task)
    trace = vf.Trace(task=vf.TraceTask(type=type(task).__name__, data=task.data), agent=vf.AgentInfo.model_construct(name="cohort"))
    for i, message in enumerate(prompt + completion):
        trace.nodes.append(vf.MessageNode(message={"tool_call_id": "", **message, "tool_calls": None}, parent=i - 1 if i else None,
                                          sampled=i >= len(prompt) and message["role"] == "assistant"))
    await task.score(trace)
    return trace.reward if trace.rewards else None


@conversational
def reward(completions, prompts, task, **fields):
    return [asyncio.run(score(*conversation)) for conversation in zip(prompts, completions, task)]


if __name__ == "__main__":
    for task in TASKSET.take(int(sys.argv[1])):
        system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
        print(json.dumps({"prompt": system + [{"role": "user", "content": task.data.prompt_text}],
                          "task": task.data.model_dump(mode="json")}))
