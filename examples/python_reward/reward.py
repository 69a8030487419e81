"""The demo's reward as a Python function: 1 if the digit after the last colon is the parity."""


def reward(completions, answers, **fields):
    return [float(completion.rpartition(":")[2].strip() == answer) if ":" in completion else 0.0
            for completion, answer in zip(completions, answers)]
