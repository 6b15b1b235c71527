"""`job.step`: called once, and remembered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pulse_trio import Job  # noqa: TC001 -- read when the handler is declared

if TYPE_CHECKING:
    from support.trees import Trees


async def test_a_later_attempt_gets_the_results_of_steps_without_calling_them(trees: Trees) -> None:
    calls: list[str] = []

    async def fetch(number: int) -> dict[str, int]:
        calls.append(f"fetch {number}")
        return {"number": number}

    def plain(text: str) -> str:
        calls.append(text)
        return text * 2

    @trees.handlers.job(durable=True)
    async def order(job: Job) -> list[object]:
        one = await job.step(fetch, 7)
        two = await job.step(plain, "ab")
        if job.attempt < 3:
            raise ValueError("not yet")
        return [one, two]

    job_id = trees.enqueue("order")
    for _ in range(3):
        trees.again()
        await trees.burst()
    found = trees.job(job_id)
    assert (found["state"], found["result"]) == ("completed", [{"number": 7}, "abab"])
    assert calls == ["fetch 7", "ab"]
    assert trees.lines(job_id) == [(1, "1:step", "fetch"), (1, "2:step", "plain")]
