"""Parts of the endpoint that need no server: stop texts, tenants, what is refused, and a loop that fails."""

import threading

import numpy as np
import pytest

from endpoint import protocol
from endpoint.protocol import BadRequestError, ChatRequest
from endpoint.serving_loop import Call, ServingLoop
from endpoint.stop_texts import StopTexts
from endpoint.tenants import Tenants


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_stop_texts_wherever_the_text_is_cut(size):
    text = "one END two STOP three"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]

    def shown(*stops):
        found = StopTexts(stops)
        return "".join([*(found.add(piece) for piece in pieces), "" if found.found else found.finish()]), found.found

    assert shown("STOP", "NEVER") == ("one END two ", True)
    assert shown("END two", "two") == ("one ", True)
    assert shown("threes") == (text, False)
    assert shown() == (text, False)


def test_a_key_is_a_tenant(tmp_path):
    anyone = Tenants()
    assert anyone.namespace("Bearer one") != anyone.namespace("Bearer two")
    assert "secret" not in anyone.namespace("Bearer secret")
    assert anyone.namespace("Basic one") is anyone.namespace(None) is anyone.namespace("Bearer ") is None
    path = tmp_path / "keys"
    path.write_text("# people\nalice key-a\nbob key-b\n")
    known = Tenants.read(path)
    assert known.namespace("Bearer key-b") == "bob"
    assert known.namespace("Bearer key-c") is None
    path.write_text("alice key-a\nbob key-a\n")
    with pytest.raises(ValueError, match="line 2"):
        Tenants.read(path)


def test_what_would_change_an_answer_is_refused_and_habits_are_not():
    def request(**fields):
        return ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], **fields)

    protocol.check(request(user="me", presence_penalty=0, response_format={"type": "text"}))
    for fields in ({"presence_penalty": 1}, {"response_format": {"type": "json_object"}}, {"unheard_of": 1}, {"n": 3}):
        with pytest.raises(BadRequestError, match=next(iter(fields))):
            protocol.check(request(**fields))
    assert protocol.messages_of(request())[0]["content"] == "x"
    nothing = request(**dict.fromkeys(("temperature", "top_p", "n", "stream", "stop", "seed", "tools", "logprobs")))
    protocol.check(nothing)
    assert nothing == request()


class Batcher:
    """Fails in its second step."""

    def __init__(self):
        self.slots, self.tickets, self.steps, self.store = [], {}, 0, None
        self.busy = False

    def submit(self, prompt, **options):
        self.busy = True
        self.tickets[0] = type("Ticket", (), {"ended": False})
        return 0

    def step(self):
        self.steps += 1
        if self.steps == 2:
            raise MemoryError("no room")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_step_that_fails_is_told_to_who_waits():
    loop, ended, told = ServingLoop(Batcher()), [], threading.Event()

    def on_end(event):
        ended.append(event)
        told.set()

    loop.read().cancel()  # whoever asked has given up; it is no reason to end
    loop.submit(Call(np.zeros(3, np.int32), {}, print, on_end))
    assert loop.alive
    loop.start()
    assert told.wait(10)
    loop.close()
    assert isinstance(ended[0], MemoryError)
    assert not loop.alive
