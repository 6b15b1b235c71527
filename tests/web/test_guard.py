"""The guard, alone in front of a small app: sessions, tokens, hosts, proxies, headers, bounds."""

from __future__ import annotations

import html
import re
import time
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from argon2 import PasswordHasher
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Mount, Route

from pulse_trio.web.security import User, WebSettings, context, redirect, secure
from support.sites import open_site

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from starlette.requests import Request

pytestmark = pytest.mark.anyio
HASHER = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
USERS = f"ada:{HASHER.hash('ada her password')} bob:{HASHER.hash('bob her password')}"
SECRET = "a secret of the tests, long enough to be one"  # noqa: S105
HOME = "http://127.0.0.1"


@pytest.fixture(params=["trio", "asyncio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param


async def answer(request: Request, error: Any) -> Response:
    return PlainTextResponse(error.detail, error.status_code, error.headers)


def page(request: Request, template: str, data: object = None, /, *, status: int = 200, **more: Any) -> Response:
    told = context(request)
    return HTMLResponse(f"{template} {more} flash=[{told['flash']}] token=[{told['csrf_token']}]", status)


async def show(request: Request) -> Response:
    told = context(request)
    name = None if told["user"] is None else told["user"].name
    return HTMLResponse(f"user=[{name}] flash=[{told['flash']}] token=[{told['csrf_token']}]")


async def change(request: Request) -> Response:
    request.app.state.changes.append((request.state.user.name, dict(request.state.form)))
    return redirect(request, "/", flash="changed")


async def stream(request: Request) -> Response:
    async def lines() -> AsyncGenerator[str]:
        yield "data: one\n\n"
        await anyio.sleep_forever()

    return StreamingResponse(lines(), media_type="text/event-stream")


def make_app(*, read_only: bool = False, authenticate: Any = None, **settings: Any) -> Starlette:
    routes = [
        Route("/", show),
        Route("/jobs", show),
        Route("/api/jobs", show),
        Route("/stream", stream),
        Route("/change", change, methods=["POST"]),
        Mount("/static", routes=[Route("/style.css", lambda _: PlainTextResponse("css"))]),
    ]
    app = Starlette(routes=routes)
    app.state.changes = []
    given: dict[str, Any] = {"users": USERS, "secret": SECRET, **settings}
    secure(app, read_only=read_only, authenticate=authenticate, answer=answer, page=page, settings=WebSettings(**given))
    return app


def browser(app: Any, *, base: str = HOME, client: str = "127.0.0.1", **more: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, client=(client, 1)), base_url=base, **more)


def token_in(text: str) -> str:
    found = re.search(r"token=\[(.+?)\]", text)
    assert found is not None
    return found[1]


async def log_in(http: httpx.AsyncClient, name: str = "ada", *, password: str | None = None) -> httpx.Response:
    token = token_in((await http.get("/login")).text)
    data = {"csrf_token": token, "name": name, "password": f"{name} her password" if password is None else password}
    return await http.post("/login", data=data)


# Logging in


async def test_a_user_logs_in_changes_something_sees_the_line_once_and_logs_out() -> None:
    app = make_app()
    async with browser(app) as http:
        away = await http.get("/jobs?state=dead")
        assert (away.status_code, away.headers["location"]) == (303, "/login?next=/jobs%3Fstate%3Ddead")
        inside = await log_in(http)
        assert (inside.status_code, inside.headers["location"]) == (303, "/")
        first = await http.get("/")
        assert "user=[ada]" in first.text
        done = await http.post("/change", data={"csrf_token": token_in(first.text), "what": "it"})
        assert done.status_code == 303
        assert app.state.changes[0][0] == "ada"
        assert "flash=[changed]" in (await http.get("/")).text
        last = await http.get("/")
        assert "flash=[None]" in last.text
        out = await http.post("/logout", data={"csrf_token": token_in(last.text)})
        assert out.headers["location"] == "/login"
        assert (await http.get("/")).status_code == 303


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/jobs", {}, 303),
        ("/api/jobs", {}, 401),
        ("/stream", {"sec-fetch-mode": "cors"}, 401),
        ("/static/style.css", {}, 200),
        ("/nowhere", {}, 303),
        ("/static/../jobs", {}, 303),
        ("/static/%2e%2e/jobs", {}, 404),
        ("//jobs", {}, 303),
    ],
)
async def test_without_a_login_nothing_but_static_files_is_shown(
    path: str, headers: dict[str, str], status: int
) -> None:
    async with browser(make_app()) as http:
        shown = await http.get(path, headers=headers)
    assert shown.status_code == status
    assert "user=[" not in shown.text


@pytest.mark.parametrize(
    "there", ["//evil.example", "https://evil.example/", "/\\evil.example", "evil", "/a\nb", "\t//x"]
)
async def test_a_login_leads_nowhere_else(there: str) -> None:
    async with browser(make_app()) as http:
        form = await http.get("/login", params={"next": there})
        assert "'there': '/'" in form.text
        done = await http.post(
            "/login",
            data={"csrf_token": token_in(form.text), "name": "ada", "password": "ada her password", "next": there},
        )
    assert done.headers["location"] == "/"


async def test_a_login_makes_a_new_session_and_ends_the_one_that_the_browser_had() -> None:
    app = make_app()
    async with browser(app) as http, browser(app) as planted:
        await http.get("/login")
        before = http.cookies["pulse-trio"]
        planted.cookies.set("pulse-trio", before)
        await log_in(http)
        assert http.cookies["pulse-trio"] != before
        assert (await planted.get("/")).status_code == 303
        assert (await planted.post("/change", data={"csrf_token": "x"})).status_code == 401


@pytest.mark.parametrize("planted", ["", "abc", "eyJzIjoiYSIsIm4iOiJhZGEiLCJmIjoiIn0.Zx.abc", "a" * 5000, "ü"])
async def test_a_session_that_the_server_did_not_sign_is_none(planted: str) -> None:
    async with browser(make_app()) as http:
        shown = await http.get("/", headers=[(b"cookie", b"pulse-trio=" + planted.encode())])
    assert shown.status_code == 303


async def test_a_cookie_of_before_the_logout_is_refused_and_its_stream_ends() -> None:
    app = make_app()
    async with browser(app) as http, browser(app) as thief:
        await log_in(http)
        thief.cookies.set("pulse-trio", http.cookies["pulse-trio"])
        token = token_in((await thief.get("/")).text)
        begun = anyio.Event()
        parts: list[bytes] = []

        async def read_stream() -> None:
            # The transport of httpx answers when the app has: a stream is read as the server would send it.
            await raw_get(app, "/stream", thief.cookies["pulse-trio"], begun, parts)

        async with anyio.create_task_group() as group:
            group.start_soon(read_stream)
            await begun.wait()
            await http.post("/logout", data={"csrf_token": token})
        assert parts == [b"data: one\n\n", b""]
        assert (await thief.get("/")).status_code == 303


async def raw_get(app: Any, path: str, cookie: str, begun: anyio.Event, parts: list[bytes]) -> None:
    async def receive() -> Any:
        await anyio.sleep_forever()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            parts.append(message["body"])
            begun.set()

    await app(raw_scope(path, cookie), receive, send)


def raw_scope(
    path: str, cookie: str, method: str = "GET", headers: Sequence[tuple[bytes, bytes]] = ()
) -> dict[str, Any]:
    own = [(b"host", b"127.0.0.1"), (b"cookie", f"pulse-trio={cookie}".encode())]
    return {
        "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"", "scheme": "http",
        "headers": [*own, *headers], "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
        "http_version": "1.1", "asgi": {"version": "3.0"},
    }  # fmt: skip


async def test_a_session_ends_with_its_time_and_with_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app(session=600.0)
    async with browser(app) as http:
        await log_in(http)
        assert (await http.get("/")).status_code == 200
        changed = make_app(session=600.0, users=f"ada:{HASHER.hash('another password')}")
        async with browser(changed, cookies=http.cookies) as other:
            assert (await other.get("/")).status_code == 303
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now + 602)
        assert (await http.get("/")).status_code == 303


async def test_processes_with_one_secret_share_sessions_and_others_do_not() -> None:
    async with browser(make_app()) as http:
        await log_in(http)
        async with browser(make_app(), cookies=http.cookies) as same:
            assert (await same.get("/")).status_code == 200
        async with browser(make_app(secret=""), cookies=http.cookies) as other:
            assert (await other.get("/")).status_code == 303


# Guessing


async def test_guessing_one_name_is_bounded_from_however_many_addresses() -> None:
    app = make_app()
    answers: list[int] = []
    for n in range(12):
        async with browser(app, client=f"10.0.0.{n}") as http:
            answers.append((await log_in(http, password=f"guess {n}")).status_code)
    assert answers == [403] * 10 + [429] * 2
    async with browser(app, client="10.0.1.1") as http:
        right = await log_in(http)
        assert right.status_code == 429
        assert int(right.headers["retry-after"]) > 0
        assert (await log_in(http, "bob")).status_code == 303


async def test_guessing_from_one_address_is_bounded_over_all_names_and_a_v6_network_is_one() -> None:
    app = make_app()
    answers: list[int] = []
    for n in range(32):
        async with browser(app, client=f"2001:db8::{n:x}") as http:
            answers.append((await log_in(http, name=f"name{n}", password="x")).status_code)
    assert answers == [403] * 30 + [429] * 2


async def test_guesses_at_the_same_moment_are_all_counted() -> None:
    app = make_app()
    async with browser(app) as http:
        token = token_in((await http.get("/login")).text)
        answers: list[int] = []

        async def guess(n: int) -> None:
            data = {"csrf_token": token, "name": "ada", "password": f"guess {n}"}
            answers.append((await http.post("/login", data=data)).status_code)

        async with anyio.create_task_group() as group:
            for n in range(20):
                group.start_soon(guess, n)
    assert sorted(answers) == [403] * 10 + [429] * 10


async def test_a_guesser_with_an_account_wins_no_guesses_by_logging_in() -> None:
    app = make_app()
    answers: list[int] = []
    async with browser(app) as http:
        for n in range(34):
            await log_in(http, "bob")
            http.cookies.clear()
            answers.append((await log_in(http, name=f"name{n}", password="guess")).status_code)
    assert answers == [403] * 30 + [429] * 4


async def test_what_a_refused_login_says_does_not_tell_whether_the_name_exists(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with browser(make_app()) as http:
        known = await log_in(http, "ada", password="wrong")
        unknown = await log_in(http, "eve", password="wrong")
        passwords = await log_in(http, "ada her password", password="")
    text = re.compile(r"token=\[.+?\]")
    assert text.sub("", known.text).replace("ada", "eve") == text.sub("", unknown.text)
    assert known.status_code == unknown.status_code == passwords.status_code == 403
    assert "'ada'" in caplog.text
    assert "her password" not in caplog.text


# Changes


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 303),
        ({"origin": HOME}, 303),
        ({"origin": "http://127.0.0.1:80"}, 303),
        ({"sec-fetch-site": "same-origin"}, 303),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1.evil.example"}, 403),
        ({"origin": "http://127.0.0.1:8081"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
    ],
)
async def test_a_change_from_a_page_of_another_origin_is_refused(headers: dict[str, str], status: int) -> None:
    app = make_app()
    async with browser(app) as http:
        await log_in(http)
        token = token_in((await http.get("/")).text)
        done = await http.post("/change", data={"csrf_token": token}, headers=headers)
    assert done.status_code == status
    assert len(app.state.changes) == (status == 303)


@pytest.mark.parametrize(("origin", "status"), [("https://127.0.0.1", 303), ("http://127.0.0.1", 403)])
async def test_the_http_site_of_the_same_name_is_another_origin_than_the_https_one(origin: str, status: int) -> None:
    app = make_app(trusted_proxies=("10.0.0.0/8",))
    headers = {"x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.9"}
    async with browser(app, client="10.0.0.1", headers=headers, base="https://127.0.0.1") as http:
        await log_in(http)
        token = token_in((await http.get("/")).text)
        done = await http.post("/change", data={"csrf_token": token}, headers={"origin": origin})
    assert done.status_code == status


async def test_a_change_without_the_token_of_its_session_is_refused() -> None:
    app = make_app()
    async with browser(app) as ada, browser(app) as bob, browser(app) as visitor:
        await log_in(ada)
        await log_in(bob, "bob")
        theirs = token_in((await bob.get("/")).text)
        before = token_in((await visitor.get("/login")).text)
        for given in (None, "", "x", "é", ".", theirs, before, [theirs, theirs]):
            done = await ada.post("/change", data={} if given is None else {"csrf_token": given})
            assert done.status_code == 403, given
        own = token_in((await ada.get("/")).text)
        assert (await ada.post(f"/change?csrf_token={own}")).status_code == 403
        assert (await ada.post("/change", headers={"x-csrf-token": own})).status_code == 303
    assert len(app.state.changes) == 1


async def test_a_login_or_logout_without_a_token_is_refused() -> None:
    async with browser(make_app()) as http:
        forged = await http.post("/login", data={"name": "ada", "password": "ada her password"})
        assert forged.status_code == 403
        await log_in(http)
        assert (await http.post("/logout")).status_code == 403
        assert (await http.get("/logout")).status_code == 405
        assert (await http.get("/")).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/json", "multipart/form-data; boundary=x", ""])
async def test_a_change_that_is_no_plain_form_is_refused(kind: str) -> None:
    app = make_app()
    async with browser(app) as http:
        await log_in(http)
        token = token_in((await http.get("/")).text)
        body = f"csrf_token={token}"
        done = await http.post("/change", content=body, headers={"content-type": kind, "x-csrf-token": token})
    assert done.status_code == 415
    assert app.state.changes == []


async def test_a_viewer_looks_and_changes_nothing_and_so_does_everyone_when_read_only() -> None:
    for app in (make_app(viewers=("ada",)), make_app(read_only=True)):
        async with browser(app) as http:
            await log_in(http)
            shown = await http.get("/")
            assert "user=[ada]" in shown.text
            for method in ("POST", "PUT", "DELETE", "PATCH"):
                done = await http.request(method, "/change", data={"csrf_token": token_in(shown.text)})
                assert done.status_code == 403
            out = await http.post("/logout", data={"csrf_token": token_in((await http.get("/")).text)})
            assert out.status_code == 303
        assert app.state.changes == []


async def test_a_body_is_bounded_whatever_its_length_says() -> None:
    app = make_app()
    kind = {"content-type": "application/x-www-form-urlencoded"}
    async with browser(app) as http:
        assert (await http.post("/login", content=b"x" * 20_000, headers=kind)).status_code == 413
        await log_in(http)
        assert (await http.post("/change", content=b"a=1&" * 3000, headers=kind)).status_code == 413
        many = {"content-length": "99999999999", **kind}
        assert (await http.post("/change", content=b"", headers=many)).status_code == 413
        statuses: list[int] = []
        read = 0

        async def receive() -> Any:
            nonlocal read
            read += 1
            return {"type": "http.request", "body": b"x" * 65536, "more_body": True}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        headers = [(name.encode(), value.encode()) for name, value in kind.items()]
        await app(raw_scope("/change", http.cookies["pulse-trio"], "POST", headers), receive, send)
    assert statuses == [413, 0]
    assert read == 65


# Where a request comes from


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8080", 200),
        ("localhost:8080", 200),
        ("LOCALHOST", 200),
        ("[::1]:8080", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost.evil.example:8080", 421),
        ("192.168.0.1", 421),
        ("", 400),
        ("a b", 400),
        ("localhost@evil.example", 400),
        ("localhost/evil", 400),
        ("localhost:x", 400),
    ],
)
async def test_a_page_without_logins_answers_under_names_of_this_machine_alone(host: str, status: int) -> None:
    async with browser(make_app(users="")) as http:
        shown = await http.get("/", headers={"host": host})
    assert shown.status_code == status
    assert ("user=[local]" in shown.text) == (status == 200)


async def test_a_request_with_two_hosts_is_refused() -> None:
    async with browser(make_app(users="")) as http:
        shown = await http.get("/", headers=[("host", "127.0.0.1"), ("host", "evil.example")])
    assert shown.status_code == 400


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded", "x-real-ip", "x-forwarded-host", "via"])
async def test_a_page_without_logins_answers_no_other_machine_and_no_proxy(name: str) -> None:
    async with browser(make_app(users="")) as http:
        assert (await http.get("/", headers={name: "127.0.0.1"})).status_code == 403
    for client in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", ""):
        async with browser(make_app(users=""), client=client) as http:
            refused = await http.get("/")
            assert refused.status_code == 403
            assert "PULSE_TRIO_WEB_USERS" in refused.text
    async with browser(make_app(users=""), client="::1") as http:
        assert (await http.get("/")).status_code == 200


async def test_with_a_list_of_hosts_no_other_name_is_answered() -> None:
    app = make_app(hosts=("jobs.example.org", "*.intern.example"))
    async with browser(app) as http:
        for host, status in [
            ("jobs.example.org", 303), ("JOBS.example.org.:443", 303), ("a.intern.example", 303), ("localhost", 303),
            ("intern.example", 421), ("evil.example", 421), ("xintern.example", 421), ("jobs.example.org.evil", 421),
        ]:  # fmt: skip
            assert (await http.get("/", headers={"host": host})).status_code == status, host


async def test_forwarded_headers_are_believed_of_trusted_proxies_alone() -> None:
    https = {"x-forwarded-proto": "https", "x-forwarded-for": "203.0.113.9, 10.0.0.2"}
    app = make_app(trusted_proxies=("10.0.0.0/8",))
    async with browser(app, client="10.0.0.1") as behind, browser(app, client="192.0.2.1") as direct:
        cookie = (await behind.get("/login", headers=https)).headers["set-cookie"]
        assert cookie.startswith("__Host-pulse-trio=")
        assert {"Secure", "HttpOnly", "Path=/", "SameSite=Lax"} <= set(cookie.split("; "))
        cookie = (await direct.get("/login", headers=https)).headers["set-cookie"]
        assert cookie.startswith("pulse-trio=")
        assert "Secure" not in cookie
    statuses: list[int] = []
    for n in range(32):
        # What the client itself writes to the left changes nothing: it is one address.
        headers = https | {"x-forwarded-for": f"198.51.100.{n}, 203.0.113.9, 10.0.0.2"}
        async with browser(app, client="10.0.0.1", headers=headers, base="https://127.0.0.1") as http:
            statuses.append((await log_in(http, name=f"name{n}", password="x")).status_code)
    assert statuses == [403] * 30 + [429] * 2


async def test_an_app_of_ones_own_says_who_asks() -> None:
    async def authenticate(request: Request) -> User | Response | None:
        name = request.headers.get("x-user")
        return redirect_away if name == "away" else User(name, may_act=name == "ada") if name else None

    redirect_away = PlainTextResponse("log in there", 307, {"location": "https://sso.example/"})
    app = make_app(authenticate=authenticate)
    async with browser(app, client="10.0.0.1", base="http://jobs.example") as http:
        assert (await http.get("/")).status_code == 403
        assert (await http.get("/", headers={"x-user": "away"})).status_code == 307
        assert (await http.get("/login")).status_code == 403
        shown = await http.get("/", headers={"x-user": "ada"})
        data = {"csrf_token": token_in(shown.text)}
        assert (await http.post("/change", data=data)).status_code == 403
        assert (await http.post("/change", data=data, headers={"x-user": "eve"})).status_code == 403
        assert (await http.post("/change", data=data, headers={"x-user": "ada"})).status_code == 303
    assert [name for name, _ in app.state.changes] == ["ada"]


def gives(value: object) -> Callable[[Request], Any]:
    return lambda _: value


async def breaks(_: Request) -> User:
    raise AttributeError("no such session")


async def refuses(_: Request) -> User:
    raise HTTPException(401, "Your badge has expired.")


@pytest.mark.parametrize(
    ("authenticate", "said"),
    [
        (gives("ada"), "it must return a pulse_trio.web.User, None to refuse the request, or a response of"),
        (gives("ada"), "it returned str."),
        (gives({"name": "ada"}), "it returned dict."),
        (gives(True), "it returned bool."),
        (breaks, "create_app(authenticate=...): it raised AttributeError."),
    ],
)
async def test_a_mistake_of_the_apps_own_authenticate_is_said_to_be_one(
    authenticate: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It was `a mistake of ours`, with an AttributeError of the guard in the log."""
    async with open_site("postgresql://nobody@127.0.0.1:1/none", authenticate=authenticate) as http:
        for path in ("/", "/jobs", "/api/jobs", "/static/style.css"):
            shown = await http.get(path)
            assert shown.status_code == 500
            assert said in html.unescape(shown.text)
            assert "of ours" not in shown.text
    assert said in caplog.text
    assert ("no such session" in caplog.text) == (authenticate is breaks)


async def test_an_authenticate_may_refuse_with_starlettes_own_exception() -> None:
    async with open_site("postgresql://nobody@127.0.0.1:1/none", authenticate=refuses) as http:
        shown = await http.get("/api/jobs")
    assert (shown.status_code, shown.json()["error"]) == (401, "Your badge has expired.")


async def test_every_answer_has_the_headers_and_is_kept_by_no_cache_but_static_files() -> None:
    async with browser(make_app()) as http:
        for path, headers in [("/", {}), ("/login", {}), ("/api/jobs", {}), ("/x", {}), ("/", {"host": "a b"})]:
            found = (await http.get(path, headers=headers)).headers
            assert found["cache-control"] == "no-store"
            assert "default-src 'none'" in found["content-security-policy"]
            assert "frame-ancestors 'none'" in found["content-security-policy"]
            assert "unsafe" not in found["content-security-policy"]
            assert found["x-frame-options"] == "DENY"
            assert found["x-content-type-options"] == "nosniff"
            assert found["referrer-policy"] == "same-origin"
        assert "cache-control" not in (await http.get("/static/style.css")).headers
        assert (await http.get("/static/none.css")).headers["cache-control"] == "no-store"


async def test_under_a_prefix_the_guard_sees_the_same_paths() -> None:
    outer = Starlette(routes=[Mount("/ops/jobs", make_app())])
    async with browser(outer) as http:
        away = await http.get("/ops/jobs/jobs")
        assert away.headers["location"] == "/ops/jobs/login?next=/jobs"
        assert (await http.get("/ops/jobs/static/style.css")).status_code == 200
        form = await http.get("/ops/jobs/login")
        assert "Path=/ops/jobs/" in form.headers["set-cookie"]
        data = {"csrf_token": token_in(form.text), "name": "ada", "password": "ada her password", "next": "/jobs"}
        done = await http.post("/ops/jobs/login", data=data)
        assert done.headers["location"] == "/ops/jobs/jobs"
        assert "user=[ada]" in (await http.get("/ops/jobs/jobs")).text


async def test_a_websocket_is_refused() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": "/", "headers": [(b"host", b"127.0.0.1")], "client": ("127.0.0.1", 1)}
    await make_app()(scope, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
