"""Check of settings files: which hosts get an API key or run a part of the run, and no commands.

A file may come from a stranger, who could otherwise have any secret of the environment sent to their server, or run
code here: processes of a run trust each other.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from forge_agents import imports
from forge_agents.display import visible
from forge_agents.files import foreign_entry

FLAG, HOST_FLAG, MODULE_FLAG = "--send_key", "--trust_host", imports.MODULE_FLAG
_CODE_ARGS = ("program", "sandbox", "image", "container", "files", "reward", "command", "allow_weaker")
"""Arguments of environments that choose what runs on this machine, and with which rights."""
_MAX_PATH = 4096
"""Characters of a path that Linux opens."""
_DROPPED = re.compile(r"[\s\x00-\x20\x7f-\x9f]+")
_ADDRESS = re.compile(r"(?:(?<=:)|^)//|^(?:localhost|\[|[\w-]+\.)[^/]*:\d+(?:/|$)", re.IGNORECASE)
"""Beginnings of addresses: after a scheme or at the start, or a host with a port."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_HOSTS: Mapping[str, tuple[str, ...]] = {
    "ANTHROPIC_API_KEY": ("api.anthropic.com",),
    "CEREBRAS_API_KEY": ("api.cerebras.ai",),
    "DEEPSEEK_API_KEY": ("api.deepseek.com",),
    "FIREWORKS_API_KEY": ("api.fireworks.ai",),
    "GEMINI_API_KEY": ("generativelanguage.googleapis.com",),
    "GROQ_API_KEY": ("api.groq.com",),
    "HF_TOKEN": ("router.huggingface.co",),
    "MISTRAL_API_KEY": ("api.mistral.ai",),
    "NVIDIA_API_KEY": ("integrate.api.nvidia.com",),
    "OPENAI_API_KEY": ("api.openai.com",),
    "OPENROUTER_API_KEY": ("openrouter.ai",),
    "TOGETHER_API_KEY": ("api.together.xyz", "api.together.ai"),
    "XAI_API_KEY": ("api.x.ai",),
}
"""Hosts of the providers that issue the key of a variable."""
_SERVE_TOKEN = "FORGE_AGENTS_TOKEN"  # noqa: S105  # a name
"""Variable with the token of ``forge-agents serve`` on loopback."""


def check(
    settings: Any, files: Sequence[Mapping[str, Any]], agreed: Sequence[str], trusted: Sequence[str] = ()
) -> None:
    """Check the hosts that files name for API keys and processes, and print to which host each key is sent.

    Args:
        settings: A dataclass with endpoints at any depth.
        files: Contents of the settings files.
        agreed: Values of `FLAG`, each ``VARIABLE@HOST`` or ``VARIABLE@HOST:PORT``.
        trusted: Values of `HOST_FLAG`, each a host.

    Raises:
        ValueError: A file sends a key to a host that is neither its provider's nor agreed to, or names a host for
            processes or an environment of the run that is not trusted, or chooses what an environment runs here.
    """
    for address in (address for file in files for address in _addresses(file.get("mesh"))):
        if (host := urlsplit(address).hostname or address) not in trusted:
            raise ValueError(
                visible(
                    f"the settings file names {host} for processes of the run, which can then run code on this "
                    f"machine. Add {HOST_FLAG} {host} to allow this"
                )
            )
    arguments = [each for file in files for each in _env_args(file)]
    for name, text in (pair for each in arguments for pair in _texts(each, "")):
        for host in _hosts_in(text):
            if host not in trusted:
                raise ValueError(
                    visible(
                        f"the settings file sets env_args.{name} to a server on {host[:200]}. Add {HOST_FLAG} "
                        f"{host[:200]} to allow this"
                    )
                )
    for name in (name for each in arguments for name in _CODE_ARGS if name in each):
        raise ValueError(
            f"the settings file sets env_args.{name}, which chooses what runs on this machine. Set it where the "
            f"environment is registered, or with the flag --env_args.{name}"
        )
    of_files = {variable for file in files for variable in _variables(file)}
    sent = dict.fromkeys((variable, url) for url, variable in _endpoints(settings))
    for variable, url in sent:
        host = urlsplit(url).netloc
        if variable in of_files and not _is_providers(variable, url) and f"{variable}@{host}" not in agreed:
            raise ValueError(
                visible(
                    f"the settings file sends the value of your environment variable {variable} to {host}. Add "
                    f"{FLAG} {variable}@{host} to allow this"
                )
            )
    for variable, url in sent:
        sys.stderr.write(visible(f"key    {variable} goes to {urlsplit(url).netloc}") + "\n")


def check_paths(values: Mapping[str, Any], folder: Path) -> None:
    """Check that the arguments of environments in a file name no other files of the user.

    What an environment reads, it may show to an endpoint. A file may name files in its own folder, and files and
    folders of tasks also in the current folder. Libraries look for other paths in folders of their own, so that "..",
    from there, may lead anywhere. Libraries also append to paths, and files in a folder may name others.

    Args:
        values: Content of the file.
        folder: Folder of the file.

    Raises:
        ValueError: An argument names a file elsewhere, or a folder.
    """
    for name, text in (pair for each in _env_args(values) for pair in _texts(each, "")):
        tasks = name in ("tasks", "eval_tasks")
        roots = [folder, Path.cwd()] if tasks else [folder]
        climbs = not tasks and ".." in re.split(r"[/\\]", text)
        places = [(base, path) for base in (folder, Path.cwd()) for path in _forms(text)]
        if climbs or any(_leads_out(*place, roots, with_folders=tasks) for place in places):
            kind = "folder of tasks" if tasks else "file"
            raise ValueError(
                visible(
                    f"the settings file sets env_args.{name} to {text[:200]}, a file outside of its folder, or not a "
                    f"{kind}. Set it with the flag --env_args.{name} to allow this"
                )
            )


def _forms(text: str) -> set[Path]:
    """Return the paths for which an argument may stand."""
    text = text.removeprefix("file:")[:_MAX_PATH]
    forms = {Path(text), Path(os.path.expandvars(text))} if text else set()
    with contextlib.suppress(RuntimeError):  # no such user
        forms |= {path.expanduser() for path in forms}
    return forms


def _leads_out(base: Path, path: Path, roots: Sequence[Path], *, with_folders: bool) -> bool:
    """Return whether a path, or a longer one that begins with it, may lead to a file that is in none of some folders.

    Args:
        base: Folder of a relative path.
        path: The path.
        roots: The folders.
        with_folders: Whether the path may lead to a folder.
    """
    whole = base / path
    base = Path(whole.anchor) if path.is_absolute() else base
    existing = next(each for each in (whole, *whole.parents) if each == base or _exists(each))
    if existing == base != whole:  # nothing has this name, but a library may append to the first part
        return path.is_absolute() and any(each.name.startswith(whole.parts[1]) for each in base.iterdir())
    root = next((root for root in roots if existing.resolve().is_relative_to(root.resolve())), None)
    folder = existing == whole and existing.is_dir()
    return root is None or folder > with_folders or foreign_entry([existing.resolve()], root) is not None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # no path: too long, or with a zero byte
        return False


def _env_args(values: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the arguments of environments at any depth of a file, such as those of a warm start."""
    if isinstance(values, Mapping):
        if isinstance(found := values.get("env_args"), Mapping):
            yield found
        values = [value for name, value in values.items() if name != "env_args"]
    if isinstance(values, list | tuple):
        for each in values:
            yield from _env_args(each)


def _texts(values: Any, name: str) -> Iterator[tuple[str, str]]:
    """Yield each text and key at any depth of the arguments of an environment, with the name of its argument."""
    if isinstance(values, str):
        yield name, values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _texts([str(key), value] if name else value, name or str(key))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _texts(value, name)


def _hosts_in(text: str) -> Iterator[str]:
    """Yield the host of each address in a text that names a server. Libraries drop blanks and control characters."""
    text = _DROPPED.sub("", text)
    for start in _ADDRESS.finditer(text):
        address = text[start.start() :]
        try:
            yield urlsplit(address if address.startswith("//") else f"//{address}").hostname or text
        except ValueError:  # no address for this library, but maybe for another one
            yield text


def _is_providers(variable: str, url: str) -> bool:
    parts = urlsplit(url)
    if variable == _SERVE_TOKEN and parts.hostname in _LOOPBACK:
        return True
    return parts.scheme == "https" and parts.port in (None, 443) and parts.hostname in _HOSTS.get(variable, ())


def _endpoints(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield the address and variable of each endpoint with a key, in any class."""
    if is_dataclass(settings):
        variable = getattr(settings, "api_key_env", "")
        url = getattr(settings, "url", "") or getattr(settings, "endpoint", "")
        if variable and url:
            yield url, variable
        settings = [getattr(settings, field.name) for field in fields(settings)]
    if isinstance(settings, Mapping):
        settings = settings.values()
    elif not isinstance(settings, list | tuple):
        return
    for each in settings:
        yield from _endpoints(each)


def _addresses(mesh: Any) -> Iterator[str]:
    """Yield the addresses of host processes in a file, at any depth of `mesh`, and the namespace of pods.

    The address of `mesh` itself is the controller's, which counts if it stands for all networks.
    """
    if isinstance(mesh, Mapping):
        yield from [str(mesh["namespace"])] if mesh.get("namespace") else ()
        with contextlib.suppress(OSError):  # a name
            if socket.inet_aton(urlsplit(str(mesh.get("address"))).hostname or "-") == bytes(4):
                yield str(mesh["address"])
        mesh = [value for name, value in mesh.items() if name not in ("address", "namespace")]
    if isinstance(mesh, str):
        yield from [mesh] if "://" in mesh else ()
    elif isinstance(mesh, Iterable):
        for each in mesh:
            yield from _addresses(each)


def _variables(values: Any) -> Iterator[str]:
    """Yield the values of ``api_key_env`` at any depth of a file."""
    if isinstance(values, Mapping):
        if isinstance(variable := values.get("api_key_env"), str):
            yield variable
        values = list(values.values())
    if isinstance(values, list | tuple):
        for each in values:
            yield from _variables(each)
