#!/bin/bash
# Every bash of a recorded script reads this first (BASH_ENV). It traces each command with its line,
# which the stand-ins get as STANDIN_LINE; lines of `bash -c` count from where it stands, and what
# another script starts stands where that is called.
[[ $0 -ef $STANDIN_FOLDER/standin ]] && return # in place of a script that isn't here
export STANDIN_LINE
STANDIN_BASE=0 STANDIN_CALL=
PS4='+$((STANDIN_LINE=STANDIN_BASE+LINENO))+'
if [ -n "${BASH_EXECUTION_STRING+x}" ]; then
  STANDIN_BASE=$((${STANDIN_LINE:-1} - 1))
elif [ "$0" = bash ] || [ "$0" = sh ]; then
  STANDIN_BASE=${STANDIN_LINE:-0}
elif [ -n "${STANDIN_LINE-}" ] && ! [ "$0" -ef "$STANDIN_SCRIPT" ]; then
  STANDIN_CALL=$STANDIN_LINE
  PS4="+\$((STANDIN_LINE=$STANDIN_LINE,LINENO))+"
fi

# A folder that isn't here is made, so that relative paths stay what they are: with --trust it is made
# among our own files, as what is then written or removed is meant to be elsewhere.
cd() {
  builtin cd "$@" 2>/dev/null && return 0
  local folder=${!#}
  if [ -n "${STANDIN_TRUST-}" ]; then
    [[ $folder = /* ]] || folder=${PWD#"$STANDIN_FOLDER/away"}/$folder
    folder=$STANDIN_FOLDER/away$(/usr/bin/env realpath -ms -- "$folder")
  fi
  /bin/mkdir -p -- "$folder" 2>/dev/null
  builtin cd -- "$folder" 2>/dev/null || return 0
}

# Where nothing was started before the script ended itself, it is read once more beyond that.
if [ -n "$STANDIN_BEYOND" ]; then
  exit() { return 0; }
fi

command_not_found_handle() {
  set +x # which would set it to a line of this file
  STANDIN_LINE=${STANDIN_CALL:-$((STANDIN_BASE + BASH_LINENO))} "$STANDIN_FOLDER/standin" --as "$@"
}

exec 9>>"$STANDIN_RECORDS/trace"
BASH_XTRACEFD=9
set -x
