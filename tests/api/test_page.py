"""The page as it is served: open without a key, headers, paths that lead nowhere, sizes, vendored files by hash."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
from pathlib import Path

import pytest
from operating import app_of, service_of
from serving import serving

from ssmd.api.own.operations import PAGE
from ssmd.api.own.page import POLICY, ROOT, Page
from ssmd.config import Settings

WEB = Path(__file__).parents[2] / "clients" / "web"
VENDOR = WEB / "vendor"
MOST_BYTES = 250_000  # of all that is sent, as it is: nothing is compressed
LICENCES = {"MIT": "MIT License", "Apache-2.0": "Apache License"}


@pytest.fixture(scope="module")
def page() -> Page:
    return Page.read()


def test_every_file_is_sent_as_what_it_is(page: Page) -> None:
    with serving(app_of(service_of(PAGE, Settings(api_key="a-long-secret")))) as one:
        for path in ["/", *page.paths]:
            wanted = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"} if path == "/" else {}
            answer = one.ask("GET", path, headers=wanted)
            assert answer.status == 200, path
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-cache"
            assert answer.headers["referrer-policy"] == "no-referrer"
            name = "index.html" if path == "/" else path.removeprefix(ROOT)
            assert answer.body == (WEB / name).read_bytes()
            kind = {"js": "text/javascript", "mjs": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
            assert answer.headers["content-type"].startswith(kind.get(name.rpartition(".")[2], "text/html"))
            again = one.ask("GET", path, headers={**wanted, "if-none-match": answer.headers["etag"]})
            assert (again.status, again.body) == (304, b"")
            assert again.headers["content-security-policy"] == POLICY
        assert one.ask("HEAD", "/").body == b""
        assert one.ask("POST", "/", {}).status == 405
        assert one.ask("GET", "/v1/models").status == 401


def test_the_policy_allows_nothing_inline_or_from_elsewhere() -> None:
    assert "unsafe" not in POLICY
    assert "http" not in POLICY
    assert POLICY.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    index = (WEB / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=|javascript:|https?:", index)


@pytest.mark.parametrize(
    "path",
    [
        "/page/../pyproject.toml",
        "/page/%2e%2e/%2e%2e/pyproject.toml",
        "/page/..%2f..%2fpyproject.toml",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/vendor/../index.html",
        "/page/vendor",
        "/page/",
        "/page",
        "/page/style.css/",
        "/page/style.css%00.js",
        "/page/STYLE.CSS",
        "/page/vendor/vendor.json",
        "/page/vendor/LICENSE-preact",
        "/page/\\..\\..\\pyproject.toml",
        "/page/" + "a/" * 2000,
    ],
)
def test_no_other_path_leads_anywhere(path: str) -> None:
    with serving(app_of(service_of(PAGE, Settings()))) as one:
        connection = http.client.HTTPConnection("127.0.0.1", one.port, timeout=30)
        connection.putrequest("GET", path, skip_host=False)
        connection.endheaders()
        assert connection.getresponse().status == 404
        connection.close()


def test_other_sites_may_link_to_the_page_but_not_embed_it() -> None:
    with serving(app_of(service_of(PAGE, Settings()))) as one:
        site = {"sec-fetch-site": "cross-site"}
        assert one.ask("GET", "/", headers=site | {"sec-fetch-mode": "navigate"}).status == 200
        assert one.ask("GET", "/page/page.js", headers=site | {"sec-fetch-mode": "no-cors"}).status == 403


def test_all_of_it_is_small(page: Page) -> None:
    assert 100_000 < sum(page.sizes.values()) <= MOST_BYTES


def test_vendored_files_are_what_they_say() -> None:
    rows = json.loads((VENDOR / "vendor.json").read_text("utf-8"))
    assert {row["file"] for row in rows} == {f.name for f in VENDOR.iterdir() if f.suffix in (".mjs", ".js", ".css")}
    for row in rows:
        content = (VENDOR / row["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == row["sha256"], row["file"]
        if changed := row.get("changed"):  # undone, it is the package's own file
            before = content.decode().replace(changed["to"], changed["from"]).encode()
            assert hashlib.sha256(before).hexdigest() == row["sha256_before"], row["file"]
        assert LICENCES[row["licence"]] in (VENDOR / row["licence_file"]).read_text("utf-8")
        assert re.fullmatch(r"sha512-[A-Za-z0-9+/]{86}==", row["integrity"])


def test_the_page_asks_for_no_file_that_is_not_there(page: Page) -> None:
    for name in [p.removeprefix(ROOT) for p in page.paths if p.startswith(ROOT)]:
        text = (WEB / name).read_text("utf-8")
        for asked in re.findall(r'(?:from|import) ?"(\.[^"]+)"', text):
            assert (WEB / name).parent.joinpath(asked).resolve().is_relative_to(WEB)
            assert ROOT + str((WEB / name).parent.joinpath(asked).resolve().relative_to(WEB)) in page.paths
    asked_first = re.findall(r'"(/page/[^"]+)"', (WEB / "index.html").read_text("utf-8"))
    assert set(asked_first) <= page.paths
    later = {f"{ROOT}{name}.js" for name in ("now", "models", "chart")}  # when there is time
    scripts = {p for p in page.paths if p.endswith((".js", ".mjs"))} - later
    assert scripts <= set(asked_first), "those that come first name all others, so that they come at once"
