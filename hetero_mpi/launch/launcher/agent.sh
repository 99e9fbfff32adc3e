#!/bin/sh
# AGENT [OPTIONS] HOST COMMAND...: runs a launcher's command on HOST, with the path of MPI on that host.
# Written by `hetero_mpi launch --hosts`; may be deleted while no job is being started.
while case "$1" in -*) true ;; *) false ;; esac; do shift; done
host=$1; shift
case "$host" in
{cases}
  *) there= ;;
esac
command=$*
if [ -n "$there" ]; then
  # The prefix ends at a path separator or at the end of the word.
  command=$(printf '%s\n' "$command " | sed -e {here}"$there"{rest})
fi
exec {agent} "$host" "$command"
