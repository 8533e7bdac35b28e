#!/bin/sh
# Regenerate requirements/cpu.txt and gpu.txt: complete pinned lists without hosts or paths, good for Python 3.11 to 3.13
# on Linux x86-64. Versions already in a list are kept while they fit; UPGRADE=1 takes the newest instead.
#
# The resolution for 3.11 is the base; what newer Pythons need beyond it is added, at the base's versions. A package that
# only 3.11 needs is installed on newer Pythons too, where it lies unused.
set -eu
cd "$(dirname "$0")/.."
uv=${UV:-.venv/bin/uv}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Libraries whose environments, tool calls and clients the tests use.
adapters="--extra textarena --extra reasoning-gym --extra classic --extra openenv --extra calls --extra agents --extra mcp"
# Only wheels, but for packages that publish none.
wheels="--only-binary :all:"
for package in cellpylib pycosat rlcard zss; do wheels="$wheels --no-binary $package"; done

# Not part of a CPU list: what PyPI's CUDA build of torch brings along where no CPU build is found.
cuda_only='^(nvidia-|cuda-)'

[ $# -gt 0 ] || set -- cpu gpu
for kind; do
    # Folders of wheels hold CPU builds of torch; the CUDA list must not see them.
    if [ "$kind" = gpu ]; then links=""; else links=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}; fi
    compile() {  # python, output, further options
        python=$1 output=$2
        shift 2
        UV_FIND_LINKS="$links" "$uv" pip compile pyproject.toml --quiet --python-version "$python" \
            --extra "$kind" --extra dev --extra docs $adapters --override "requirements/overrides-$kind.txt" $wheels \
            --python-platform x86_64-manylinux_2_31 --no-annotate --no-header --no-emit-find-links --no-emit-index-url \
            --output-file "$output" "$@"
    }
    # uv prefers the versions that it finds in the output file.
    if [ -z "${UPGRADE:-}" ] && [ -f "requirements/$kind.txt" ]; then cp "requirements/$kind.txt" "$work/3.11"; fi
    compile 3.11 "$work/3.11"
    # A local tag such as +cpu names a build, not a version.
    sed 's/+cpu$//' "$work/3.11" > "$work/base"
    compile 3.12 "$work/3.12" --constraint "$work/base"
    compile 3.13 "$work/3.13" --constraint "$work/base"
    cat "$work/base" "$work/3.12" "$work/3.13" | sed 's/+cpu$//' | sort -u > "$work/all"
    if [ "$kind" = cpu ]; then grep -vE "$cuda_only" "$work/all" > "$work/list"; else cp "$work/all" "$work/list"; fi
    if odd=$(grep -vE '^[A-Za-z0-9._-]+(\[[a-z,-]+\])?==[A-Za-z0-9.!]+$' "$work/list"); then
        echo "not a plain pin: $odd" >&2
        exit 1
    fi
    repeated=$(sed 's/==.*//' "$work/list" | uniq -d)
    if [ -n "$repeated" ]; then echo "two versions of: $repeated" >&2; exit 1; fi
    cp "$work/list" "requirements/$kind.txt"
    rm -f "$work"/*
    echo "requirements/$kind.txt: $(wc -l < "requirements/$kind.txt") packages"
done
