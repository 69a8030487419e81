"""Dialogues with a server of openenv 0.10.0 (the successor of openenv-core). The server's first observation for a line's seed
follows the prompt (turn 0), and each dialogue has a session of its own, which is reset with the same seed.

    seq 500 | sed 's/.*/{"prompt": [{"role": "system", "content": "Play this game."}], "seed": &}/' > problems.jsonl

    trainer: grpo
    data: {jsonl: {path: problems.jsonl}, split_by: [seed]}
    environment: {name: command, starts: yes, run: python3 PATH/TO/cohort_environment.py openenv_environment.py}
    rewards: [{name: environment}]

OPENENV_URL is the server. "message" is the field of its actions and observations: adapt it. Dialogues that a limit has ended
keep their session until the next step, so its max_concurrent_envs is to be at least the dialogues of a step and of an
evaluation.
"""
import os

from openenv import GenericEnvClient


def session_of(seed):
    session = GenericEnvClient(base_url=os.environ.get("OPENENV_URL", "http://127.0.0.1:8000")).sync()
    return session, session.reset(seed=seed).observation["message"]


class Environment:
    sessions = {}  # by step and index of the dialogue

    def start(self, fields):
        session, observation = session_of(fields["seed"])
        session.close()
        return observation

    def turn(self, step, index, turn, completion, fields):
        key = (step, index)
        if turn == 1:
            for old in [k for k in list(self.sessions) if k[0] < step or k == key]:
                if session := self.sessions.pop(old, None):
                    session.close()
            self.sessions[key], _ = session_of(fields["seed"])
        result = self.sessions[key].step({"message": completion})
        if result.done:
            self.sessions.pop(key).close()
        end = {"done": True} if result.done else {"observation": result.observation["message"]}
        return {**end, "reward": float(result.reward or 0)}
