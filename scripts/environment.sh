# SPDX-License-Identifier: Apache-2.0
# Sourced: makes the environment of pinned tools that the scripts run in.
# usage: prepare FOLDER GROUP...   (dependency groups of pyproject.toml)

# What they name would pass for installed, or break our own Python.
unset PYTHONPATH PYTHONHOME CDPATH

# The first Python on the path that is new enough, by its own word.
find_python() {
  local name
  for name in python3 python3.14 python3.13 python3.12 python3.11; do
    if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
    then
      command -v "$name"
      return
    fi
  done
  echo "error: no Python 3.11 or newer on the path" >&2
  return 1
}

prepare() {
  local folder=$1 python stamp groups=()
  shift
  python=$(find_python) || return 1
  # The stamp names what the environment was made from; a half-made one has none.
  stamp="$("$python" -VV) $* $(cksum <pyproject.toml)"
  [ "$(cat "$folder/made-from" 2>/dev/null)" = "$stamp" ] && return
  echo "prepare $folder"
  # Made aside and renamed, so that two runs at once don't undo each other.
  local made=$folder.$$
  rm -rf "$made"
  trap "rm -rf '$made'" EXIT
  if ! "$python" -m venv "$made"; then
    echo "error: $python cannot make an environment" >&2
    echo "hint: install its venv module (Debian: python3-venv)" >&2
    return 1
  fi
  for group; do groups+=(--group "$group"); done
  # Only a pip newer than most Pythons bundle knows dependency groups.
  if ! "$made/bin/python" -m pip install --quiet --retries 1 \
      --disable-pip-version-check 'pip==26.2' ||
    ! "$made/bin/python" -m pip install --quiet --retries 1 \
      --disable-pip-version-check "${groups[@]}"; then
    echo "error: cannot install the pinned tools ($*)" >&2
    echo "hint: check the network and pip's index settings (pip config list)" >&2
    return 1
  fi
  echo "$stamp" >"$made/made-from"
  if [ "$(cat "$folder/made-from" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$folder"
    mv "$made" "$folder"
  fi
  rm -rf "$made"
  trap - EXIT
}
