#!/bin/sh
# Create .venv, install the pinned list of $KIND (cpu or gpu) and this project into it, and complete it as anybody's
# environment is completed: `forge-agents doctor --fix`. Called by the Makefile.
#
# Reads KIND, PYTHON, TORCH_INDEX and pip's and uv's own settings. Nothing is resolved: every package is installed
# with --no-deps, because the pins inside some packages contradict each other (docs/decisions/packaging.md).
set -eu
cd "$(dirname "$0")/.."
kind=${KIND:-cpu}
list=requirements/$kind.txt
venv_python=.venv/bin/python
say() { echo "make: $*" >&2; }
die() { say "$*"; exit 1; }

[ -f "$list" ] || die "there is no $list; KIND is cpu or gpu"
[ "$(uname -sm)" = "Linux x86_64" ] || die "only Linux on x86-64 is supported, this is $(uname -sm)"

fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; }

if [ -x $venv_python ]; then
    fits $venv_python || die ".venv/bin/python does not run or is not Python 3.11 to 3.13; run \`make clean\` and try again"
    if [ -f .venv/.kind ] && [ "$(cat .venv/.kind)" != "$kind" ]; then
        say "replacing the $(cat .venv/.kind) installation in .venv"
        rm -rf .venv
    fi
fi
if [ ! -x $venv_python ]; then
    chosen=""
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if fits "$candidate"; then chosen=$candidate && break; fi
    done
    [ -n "$chosen" ] || die "no Python 3.11 to 3.13 with venv and pip among: ${PYTHON:-python3.11 python3.12 python3.13 python3};" \
        "install one (Debian and Ubuntu: python3-venv, too) or name it with PYTHON=..."
    "$chosen" -m venv .venv
fi
echo "$kind" > .venv/.kind

retry() {  # downloads fail; what has arrived is cached, so another try continues
    for attempt in 1 2 3; do
        "$@" && return 0
        say "attempt $attempt of 3 failed"
        sleep $((attempt * 5))
    done
    return 1
}

pip="$venv_python -m pip --disable-pip-version-check"
# pip finds wheels where it is configured to; uv must be told of the same places.
# shellcheck disable=SC2086  # $pip is four words on purpose
configured() { $pip config get "global.$1" 2>/dev/null | tr -s ' \n' '  ' | sed 's/ *$//' || true; }
export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-180}" UV_HTTP_RETRIES="${UV_HTTP_RETRIES:-8}"
index=${PIP_INDEX_URL:-$(configured index-url)}
links=${PIP_FIND_LINKS:-$(configured find-links)}
if [ -n "$index" ]; then export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"; fi
if [ -n "$links" ] && [ "$kind" = cpu ]; then
    UV_FIND_LINKS=${UV_FIND_LINKS:-$(echo "$links" | tr ' ' ',')}
    export UV_FIND_LINKS
fi

install_with_uv() {
    [ -x .venv/bin/uv ] || return 1
    if [ -n "${TORCH_INDEX:-}" ]; then set -- --index "$TORCH_INDEX" --index-strategy unsafe-best-match "$@"; fi
    retry .venv/bin/uv pip install --python $venv_python "$@"
}
install_with_pip() {
    if [ -n "${TORCH_INDEX:-}" ]; then set -- --extra-index-url "$TORCH_INDEX" "$@"; fi
    # shellcheck disable=SC2086
    retry $pip install --retries 8 --timeout 180 "$@"
}
install() {
    install_with_uv "$@" && return 0
    say "uv could not do it; pip tries, more slowly"
    install_with_pip "$@"
}

if [ ! -x .venv/bin/uv ]; then
    install_with_pip --quiet "$(grep '^uv==' "$list")" || say "uv could not be installed"
fi
say "installing $(wc -l < "$list") packages from $list"
install --no-deps -r "$list" || die "the installation from $list failed; the lines above say why"

# PyPI's torch is the CUDA build: it does not import without CUDA libraries that a CPU list does not hold.
if ! $venv_python -c 'import torch' 2>/dev/null; then
    say "torch does not import: this is the build for CUDA. Installing its libraries, several GB."
    say "To avoid that: \`make clean\`, then set TORCH_INDEX to PyTorch's wheel index for CPU builds."
    install --constraint "$list" "$(grep '^torch==' "$list")" || die "torch's dependencies could not be installed"
    $venv_python -c 'import torch' || die "torch does not import; the traceback above says why"
fi

install --no-deps --no-build-isolation --editable . || die "this project could not be installed; the lines above say why"
retry .venv/bin/forge-agents doctor --fix || die "the installation could not be completed; the lines above say why"

# Every engine and learner is a new process that imports torch or vLLM: compiled once, those starts take half the time,
# also where PYTHONDONTWRITEBYTECODE is set. Some packages ship templates that do not compile; they are not imported.
say "compiling"
ours="forge_agents envs verifiers trainers"
$venv_python -m compileall -q -j 0 .venv/lib/python3.*/site-packages $ours >/dev/null 2>&1 || true
