"""A conversation with a daemon over HTTP: its messages so far, and the session that stores it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from ssmd.cli.chat.options import ChatOptions
from ssmd.daemon import answers, said
from ssmd.daemon.answers import Shape
from ssmd.daemon.client import Client, Events
from ssmd.daemon.discovery import Address, DaemonError
from ssmd.text.messages import THINK, THINK_END

CHAT = "/v1/chat/completions"
SESSIONS = "/ssmd/v1/sessions"
MODELS = "/v1/models"
PAGE = 1000  # sessions of a list at a time: the daemon's limit
STORED_S = 5.0  # longest wait until a stopped answer is stored
_BETWEEN_S = 0.05
LEAST_TOKENS = 16  # tokens left in the context that an answer needs to go on

Message = dict[str, Any]  # in the form of a request
Find = Callable[[], Address | None]
Show = Callable[[str], None]


@dataclass(frozen=True)
class ChatReply:
    """An answer."""

    text: str
    session: str | None
    usage: Mapping[str, Any] | None  # None for a stopped answer
    whole: bool  # False if it was stopped
    stored: bool
    finish: str = ""  # OpenAI's finish_reason; "" for a stopped answer


@dataclass(frozen=True)
class ContextRoom:
    """The context after an answer, in tokens. unread: number of the oldest messages that were left out."""

    context: int
    left: int
    unread: int

    @staticmethod
    def of(usage: Mapping[str, Any]) -> ContextRoom | None:
        """Read the context from a usage; None if it is unbounded or not reported."""
        own = said.of(usage, "ssmd")
        left, used = said.number(own.get("context_left")), (usage.get("prompt_tokens"), usage.get("completion_tokens"))
        if left is None:
            return None
        whole = left + sum(said.number(one) or 0 for one in used)
        return ContextRoom(int(whole), int(left), int(said.number(own.get("cut_messages")) or 0))


class Daemon:
    """The daemon, looked up again before each request: after a restart it may have another address."""

    def __init__(self, find: Find, moved: Callable[[Address], None] = lambda address: None) -> None:
        """find: returns its present address, None if none runs. moved: called with a new address."""
        self._find = find
        self._moved = moved
        self._client: Client | None = None

    def client(self) -> Client:
        """Return a client of the daemon that runs now. Raises DaemonError."""
        address = self._find()
        if address is None:
            raise DaemonError("no daemon runs any more; start it with: ssmd serve")
        if self._client is None or self._client.address != address:
            if self._client is not None:
                self._moved(address)
            self._client = Client(address)
        return self._client

    def get(self, path: str, query: Mapping[str, str] | None = None, *, holds: Shape = object) -> Any:
        """Request JSON. holds: the required shape of the answer. Raises DaemonError."""
        return self.client().get(path, query or {}, holds=holds)

    def sessions(self) -> Iterator[dict[str, Any]]:
        """Yield all sessions, the one used last first. Raises DaemonError."""
        after: dict[str, str] = {}
        while True:
            page = self.get(SESSIONS, {"limit": str(PAGE), **after}, holds=answers.SESSIONS)
            yield from page["data"]
            if not page["data"] or not page["has_more"]:
                return
            after = {"after": page["data"][-1]["id"]}

    def last_sessions(self, limit: int) -> list[dict[str, Any]]:
        """Return the sessions used last. Raises DaemonError."""
        found: list[dict[str, Any]] = self.get(SESSIONS, {"limit": str(limit)}, holds=answers.SESSIONS)["data"]
        return found

    def session(self, given: str) -> dict[str, Any]:
        """Return a session with all its turns, by its id or the beginning of that. Raises DaemonError."""
        try:
            if "/" not in given:
                path = f"{SESSIONS}/{quote(given, safe='')}"
                found: dict[str, Any] = self.get(path, holds=answers.SESSION)
                return found
        except DaemonError as err:
            if err.status not in (400, 404) or err.code == "no_store":
                raise
        fitting = [one["id"] for one in self.sessions() if given and one["id"].startswith(given)]
        if not fitting:
            raise DaemonError(f"there is no session {given!r}; `ssmd session list` shows them", status=404)
        if len(fitting) > 1:
            few = ", ".join(fitting[:3])
            raise DaemonError(f"{len(fitting)} sessions begin with {given!r}: {few}; give more of the id", status=404)
        return dict(self.get(f"{SESSIONS}/{quote(fitting[0], safe='')}", holds=answers.SESSION))

    def models(self) -> list[str]:
        """List the models that the daemon serves. Raises DaemonError."""
        return [str(one["id"]) for one in self.get(MODELS, holds=answers.MODELS)["data"]]

    def serves(self, model: str) -> bool:
        """Return True if the daemon serves a model of that name. Raises DaemonError."""
        try:
            self.get(f"{MODELS}/{quote(model, safe='')}")
        except DaemonError as err:
            if err.status in (400, 404):
                return False
            raise
        return True


@dataclass
class Talk:
    """A conversation. Used by one thread; `stop` is for signal handlers."""

    daemon: Daemon
    model: str
    options: ChatOptions = field(default_factory=ChatOptions)
    keep: bool = True  # False: nothing is stored
    messages: list[Message] = field(default_factory=list)  # all messages so far
    session: str | None = None  # None until a part of it is stored
    thinking: Callable[[bool], None] = lambda on: None  # called with True when the model begins to think, False after
    room: ContextRoom | None = None  # after the last answer, if known
    finish: str = ""  # of the last answer; "" if it was stopped
    _stream: Events | None = None
    _stopped: bool = False

    def stop(self) -> None:
        """Stop the answer under way, or else the next one. Its text so far stays."""
        self._stopped = True
        if self._stream is not None:
            self._stream.close()

    def unstop(self) -> None:
        """Let the next answer come, even after an earlier `stop`."""
        self._stopped = False

    def say(self, text: str, show: Show) -> ChatReply:
        """Send a message, and show the answer as it comes. Raises DaemonError; then no message is added."""
        return self._ask([*self.messages, {"role": "user", "content": text}], show)

    def again(self, show: Show) -> ChatReply:
        """Ask for another answer to the last question, beside the first one. Raises as `say`."""
        end = len(self.messages) - (self.messages[-1]["role"] == "assistant")
        return self._ask(self.messages[:end], show, beside=self._turns())

    def more(self, show: Show) -> ChatReply:
        """Continue the last answer, as a sibling of it. Raises as `say`, and DaemonError if it cannot go on."""
        why = self.ended()
        if why:
            raise DaemonError(why)
        return self._ask(self.messages, show, beside=self._turns())

    def ended(self) -> str:
        """Return why the last answer cannot go on, or ""."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return "there is no answer yet"
        if self.finish not in ("length", ""):
            return "the last answer is complete"
        asked = sum(m["role"] == "user" for m in self.messages[self._unread() :])
        if self.room is not None and self.room.left < LEAST_TOKENS and asked < 2:  # no older ones to leave out
            return "the last question and its answer fill the context; ask for less at a time, or begin a new chat"
        return ""

    def first_read(self) -> Message | None:
        """Return the oldest message after the system prompt that the model read; None if it read all of them."""
        at = self._unread()
        return self.messages[at] if 0 < at < len(self.messages) else None

    def _unread(self) -> int:
        """Return the index of the first message that the model read after a cut; 0 if it read all."""
        unread = 0 if self.room is None else self.room.unread
        return unread and unread + (self.system is not None)

    def edited(self, text: str, show: Show) -> ChatReply:
        """Send another message in place of the last question: a branch. Raises as `say`."""
        return self._ask([*self.messages[: self._last_question()], {"role": "user", "content": text}], show)

    def last_question(self) -> str | None:
        """Return the last question; None before the first question."""
        at = self._last_question()
        return None if at == len(self.messages) else str(self.messages[at]["content"])

    def _last_question(self) -> int:
        return max((i for i, m in enumerate(self.messages) if m["role"] == "user"), default=len(self.messages))

    @property
    def system(self) -> str | None:
        """Return the system prompt, if there is one."""
        first = self.messages[0] if self.messages else {"role": ""}
        return str(first["content"]) if first["role"] == "system" else None

    def instruct(self, text: str) -> None:
        """Set the system prompt; an empty text removes it. The messages stay, and are read again."""
        rest = self.messages if self.system is None else self.messages[1:]
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def go_to(self, given: str) -> dict[str, Any]:
        """Continue a session, by its id or the beginning of that. Returns the session. Raises DaemonError."""
        found = self.daemon.session(given)
        self.messages, self.session = conversation(found["turns"], found["head"]), found["id"]
        heads = [turn for turn in found["turns"] if turn["id"] == found["head"] and turn["complete"]]
        self.room, self.finish = None, said.text(heads[0], "finish_reason") if heads else ""
        return found

    def fork(self, turn: str | None) -> dict[str, Any]:
        """Continue in a new session that begins at a turn of this one, by default its last. Returns the session.

        Raises DaemonError.
        """
        path, body = f"{SESSIONS}/{self.session}/fork", {"turn": turn} if turn else {}
        made = self.daemon.client().send("POST", path, body, holds=answers.FORKED)
        return self.go_to(made["id"])

    def _turns(self) -> set[str]:
        """Return the ids of the session's turns so far."""
        found = self.daemon.session(self.session)["turns"] if self.session else []
        return {turn["id"] for turn in found}

    def _ask(self, messages: list[Message], show: Show, beside: Collection[str] = ()) -> ChatReply:
        """Ask for an answer; continue the last message if it is an answer itself.

        beside: turns that were there before, one of which may have the same text.
        """
        body = {"model": self.model, "messages": messages, "truncation": "auto", **self.options.fields()}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        body |= {} if self.session is None else {"session": self.session}
        body |= {} if self.keep else {"store": False, "prompt_cache_retention": "none"}
        begun = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
        messages = messages[:-1] if begun else messages
        parts = AnswerCollector(show, self.thinking, begun)
        usage: Mapping[str, Any] | None = None
        finish = ""
        session = self.session
        with self.daemon.client().stream(CHAT, body) as self._stream:
            try:
                if self._stopped:  # stopped before there was a stream to close
                    self._stream.close()
                session = self._stream.headers.get("x-ssmd-session", session)
                for event in self._stream:
                    usage = _read(event, parts, usage)
                    for choice in said.each(event, "choices"):
                        finish = said.text(choice, "finish_reason") or finish
                whole = self._stream.done
            finally:
                self._stream = None
                parts.pause()
        if not whole and self._stopped:
            return self._cut(messages, parts.text, begun, session, show, beside)
        if not whole or usage is None:
            raise DaemonError("the daemon went away in the middle of an answer")
        text, stored = parts.text, bool(said.of(usage, "ssmd").get("stored"))
        self.messages = [*messages, {"role": "assistant", "content": text}]
        self.session = session if stored else self.session
        self.room, self.finish = ContextRoom.of(usage), finish
        return ChatReply(text, self.session, usage, True, stored, finish)

    def _cut(
        self,
        messages: list[Message],
        text: str,
        begun: str,
        session: str | None,
        show: Show,
        beside: Collection[str],
    ) -> ChatReply:
        """Finish a stopped answer. The daemon may have stored more text than arrived; that is shown."""
        if text == begun:  # no new text, nothing to continue
            return ChatReply("", self.session, None, False, False)
        stored = self._kept(messages, text, session, beside) if session is not None and self.keep else None
        if stored is not None:
            if stored.startswith(text) and (THINK not in text or THINK_END in text):
                show(stored[len(text) :])
            self.session = session
        self.messages = [*messages, {"role": "assistant", "content": text if stored is None else stored}]
        self.finish = ""
        return ChatReply(self.messages[-1]["content"], self.session, None, False, stored is not None)

    def _kept(self, messages: list[Message], text: str, session: str, beside: Collection[str]) -> str | None:
        """Wait until the daemon has stored a stopped answer that begins so. Return its text; None if it does not."""
        until = time.monotonic() + STORED_S
        while time.monotonic() < until:
            try:
                found = self.daemon.session(session)
            except DaemonError as err:
                if err.status != 404:
                    return None
            else:
                for turn in reversed(found["turns"]):
                    answer = turn["messages"][-1]["content"]
                    new = turn["id"] not in beside and _bare(answer).startswith(_bare(text))
                    if new and conversation(found["turns"], turn["id"])[:-1] == messages:
                        return str(answer)
            time.sleep(_BETWEEN_S)
        return None


def conversation(turns: Sequence[Mapping[str, Any]], head: str) -> list[Message]:
    """Return the messages up to a turn, from a session's turns."""
    by_id, path = {turn["id"]: turn for turn in turns}, []
    at: str | None = head
    while at in by_id:
        path.append(by_id.pop(at))  # no turn twice, even if the rows are not a tree
        at = path[-1]["parent"]
    return [message for turn in reversed(path) for message in turn["messages"]]


def _bare(text: str) -> str:
    """Return a text without spaces and reasoning marks, of which a template may have written the first."""
    return "".join(text.replace(THINK, "").replace(THINK_END, "").split())


def _read(
    event: Mapping[str, Any], parts: AnswerCollector, usage: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """Add an event to the answer. Returns the usage known then. Raises DaemonError for an error event."""
    if (error := event.get("error")) is not None:
        message = error.get("message") if isinstance(error, dict) else error
        raise DaemonError(str(message))
    for choice in said.each(event, "choices"):
        delta = said.of(choice, "delta")
        parts.think(said.text(delta, "reasoning_content"))
        parts.say(said.text(delta, "content"))
    return said.of(event, "usage") or usage


class AnswerCollector:
    """Collects one answer. show: takes its text. thinking: called with True when reasoning begins, False when it ends.

    begun: the text that it begins with, which is not shown again.
    """

    def __init__(self, show: Callable[[str], None], thinking: Callable[[bool], None], begun: str = "") -> None:
        self._show, self._thinking = show, thinking
        self._parts = [begun] if begun else []
        self._thinks = THINK in begun and THINK_END not in begun
        self._told = False

    @property
    def text(self) -> str:
        """Return the whole text, with the reasoning in <think>…</think> as in messages."""
        return "".join(self._parts)

    def think(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._parts.append(text if self._thinks else f"{THINK}\n{text}")
            self._thinks = True
            self._tell(True)

    def say(self, text: str) -> None:
        """Add text of the answer."""
        if text:
            self._tell(False)
            self._parts.append(f"\n{THINK_END}\n\n{text}" if self._thinks else text)
            self._thinks = False
            self._show(text)

    def pause(self) -> None:
        """Note that nothing more comes for now."""
        self._tell(False)

    def _tell(self, on: bool) -> None:
        if on != self._told:
            self._told = on
            self._thinking(on)
