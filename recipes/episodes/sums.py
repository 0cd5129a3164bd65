"""Arithmetic with a calculator, which a tiny model needs: the data for it.

    python recipes/episodes/sums.py runs/sums

Writes prompts.jsonl and held_out.jsonl, an expression each with its `answer`, and demonstrations.jsonl: half of them
call the calculator and copy what it says, half answer at once, with a wrong number.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from async_rlhf.commands.stage import json_lines
from async_rlhf.system.files import whole_file
from async_rlhf.tasks.tools import calculate


def right(messages, answer, **columns):
    """1 where the policy's last message is the answer; what the calculator says is not the policy's."""
    last = [chat[-1] for chat in messages]
    return [float(said == {"role": "assistant", "content": wanted}) for said, wanted in zip(last, answer, strict=True)]


def asked(expression: str) -> dict[str, str]:
    """The user's message."""
    return {"role": "user", "content": f"{expression} = ?"}


def demonstrations(expression: str, chance: random.Random) -> list[list[dict[str, str]]]:
    """Chats; in each of them the last message is what is learnt."""
    answer, chat = calculate(expression), [asked(expression)]
    if chance.random() < 0.5:
        return [[*chat, {"role": "assistant", "content": str(int(answer) + chance.randint(1, 2000))}]]
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    chat.append({"role": "assistant", "content": f"<tool_call>{call}</tool_call>"})
    told = [{"role": "tool", "content": answer}, {"role": "assistant", "content": answer}]
    return [chat, [*chat, *told]]


def main() -> None:
    """Write the three files."""
    folder, chance, sums = Path(sys.argv[1]), random.Random(0), int((*sys.argv[2:], 16_000)[0])
    folder.mkdir(parents=True, exist_ok=True)
    numbers = chance.sample(range(90 * 90 * 900), sums)
    expressions = [f"{10 + n % 90}*{10 + n // 90 % 90}+{100 + n // 8100}" for n in numbers]
    rows = [{"messages": [asked(one)], "answer": calculate(one)} for one in expressions[: sums // 4]]
    chats = [{"messages": chat} for one in expressions[sums // 4 :] for chat in demonstrations(one, chance)]
    for name, each in (("prompts", rows[: -sums // 40]), ("held_out", rows[-sums // 40 :]), ("demonstrations", chats)):
        with whole_file(folder / f"{name}.jsonl") as file:
            file.write(json_lines(each))


if __name__ == "__main__":
    main()
