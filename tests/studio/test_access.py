"""Who may use the studio: pages of its own, on this machine, that know the token."""

from __future__ import annotations

import http.client
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page

from stageline.errors import ReportError
from stageline.studio.app import PAGES
from stageline.studio.serve import Studio


def get(address: str, path: str = "", **headers: str) -> tuple[int, str, dict[str, str]]:
    parts = urlsplit(address)
    assert parts.hostname is not None
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request("GET", parts.path + path, headers=names)
    response = connection.getresponse()
    found = response.status, response.read().decode(), dict(response.getheaders())
    connection.close()
    return found


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_served_to_who_knows_the_token(studio: str, name: str) -> None:
    status, text, headers = get(studio, name)
    assert status == 200
    assert text.startswith("<!DOCTYPE html>")
    assert "default-src 'none'" in headers["content-security-policy"]


@pytest.mark.parametrize("token", ["", "wrong", "wrong/schedules", "static/shared/theme.css", "é"])
def test_without_the_token_nothing_is_served(studio: str, token: str) -> None:
    parts = urlsplit(studio)
    status, text, _ = get(
        f"http://{parts.netloc}/", token.encode().decode("latin-1").replace("Ã©", "%C3%A9")
    )
    assert (status, text.partition(":")[0]) == (403, "the token is missing or wrong")


@pytest.mark.parametrize(
    "host", ["example.org", "127.0.0.1.example.org", "localhost@example.org", "", "[::1"]
)
def test_another_host_name_is_refused(studio: str, host: str) -> None:
    status, text, _ = get(studio, "schedules", Host=host)
    assert (status, text.partition(":")[0]) == (403, "the host is not a name of this machine")


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:80"])
def test_a_tunnel_may_change_the_port(studio: str, host: str) -> None:
    assert get(studio, "schedules", Host=host)[0] == 200


@pytest.mark.parametrize(
    "origin", ["http://example.org", "null", "http://127.0.0.1:1", "https://127.0.0.1"]
)
def test_a_request_of_another_site_is_refused(studio: str, origin: str) -> None:
    status, text, _ = get(studio, "api/runs", Origin=origin)
    assert (status, text) == (403, "the request comes from another site\n")
    assert get(studio, "api/runs", Sec_Fetch_Site="cross-site")[0] == 403


def test_the_second_of_two_origins_is_looked_at_as_well(studio: str) -> None:
    parts = urlsplit(studio)
    connection = http.client.HTTPConnection(parts.netloc, timeout=10)
    connection.putrequest("GET", f"{parts.path}schedules")
    connection.putheader("Origin", f"http://{parts.netloc}")
    connection.putheader("Origin", "http://example.org")
    connection.endheaders()
    assert connection.getresponse().status == 403
    connection.close()


@pytest.mark.parametrize(
    "path",
    [
        "static/../access.py",
        "static/..%2faccess.py",
        "static/%2e%2e/access.py",
        "static//etc/passwd",
    ],
)
def test_nothing_outside_of_the_pages_is_read(studio: str, path: str) -> None:
    assert get(studio, path)[0] == 404


def test_a_port_in_use_is_named_with_what_to_do(studio: str, tmp_path: Path) -> None:
    port = urlsplit(studio).port
    assert port is not None
    with pytest.raises(ReportError, match=rf"port is {port}, .*in use\): use an"):
        Studio(tmp_path, port)


def test_the_pages_load_in_a_browser(studio: str, page: Page) -> None:
    page.goto(studio)
    assert page.url == f"{studio}{PAGES[0]}"
    for name in PAGES:
        page.click(f"nav a[href={name}]")
        assert page.locator("nav a[aria-current=page]").inner_text().lower() == name
