#!/usr/bin/env bash
# Refuses a commit whose subject is not "component: do one thing", in at most 72 characters.
#
#   tools/check_subject.sh .git/COMMIT_EDITMSG
set -euo pipefail

subject=$(head -n 1 "$1")
case $subject in
Merge\ * | Revert\ * | fixup!\ * | squash!\ *) exit 0 ;;
esac
if [ "${#subject}" -gt 72 ]; then
  echo "the subject has ${#subject} characters; give at most 72, and the reason in the body" >&2
  exit 1
fi
if ! grep -qE '^[a-z][a-z0-9_./, -]*: [^ ].*[^.]$' <<<"$subject"; then
  echo "the subject is \"$subject\"; write \"component: do one thing\", such as" \
    "\"optim: pad rows to equal shares\", without a full stop" >&2
  exit 1
fi
first=${subject#*: }
case ${first%% *} in
a | an | the | no | not | one | two | three | what | which | who | how | why | where | when | each | every | all | its | their | of)
  echo "the subject is \"$subject\"; begin with a verb, such as \"optim: pad rows to equal shares\"" >&2
  exit 1
  ;;
esac
