# What the *.sbatch files here have in common; each sources it. They are submitted from the directory above jobs/.
# docs/slurm.md explains their use, and what to change for your site.

if [ -z "${SLURM_JOB_ID:-}" ]; then
    echo "$0: not in a SLURM job: submit it with sbatch: sbatch $0 JOB" >&2
    exit 2
fi

# Compute nodes mostly have no network: model, tokenizer and data must be files already, and nobody asks for newer ones.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1

# The Python of your environment, on a file system that all nodes see. In a heterogeneous job there may be one for each component.
read -ra PYTHONS <<< "${PYTHONS[*]:-.venv/bin/python}"

for ((group = 0; group < ${SLURM_HET_SIZE:-1}; group++)); do
    python=${PYTHONS[group]:-${PYTHONS[-1]}} step=()
    [ "$group" -gt 0 ] && step=(srun --het-group="$group" --overlap --nodes=1 --ntasks=1 --ntasks-per-node=1)
    "${step[@]}" sh -c 'command -v "$0"' "$python" > /dev/null && continue
    echo "$0: $python does not exist${SLURM_HET_SIZE:+ on nodes of component $group}: set PYTHONS to your environment's Python" >&2
    exit 2
done

# Run directories go here, each by the name of its job file, unless --run-dir says otherwise: on a file system that all nodes see.
RUNS=${RUNS:-runs}

# A disk of the node itself, for copies of what is read often.
SCRATCH=${SCRATCH:-${SLURM_TMPDIR:-${TMPDIR:-/tmp}}}/hetero-$SLURM_JOB_ID

# each_node COMMAND...: once on every node of every component.
each_node() {
    if [ "${SLURM_HET_SIZE:-1}" -eq 1 ]; then
        srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$@"
        return
    fi
    local group nodes
    for ((group = 0; group < SLURM_HET_SIZE; group++)); do
        nodes=SLURM_JOB_NUM_NODES_HET_GROUP_$group
        srun --het-group="$group" --overlap --nodes="${!nodes}" --ntasks="${!nodes}" --ntasks-per-node=1 "$@" || return
    done
}

# to_scratch DIRECTORY: copies it to the scratch disk of every node; COPY is where it is then. `train` removes it at its end.
to_scratch() {
    COPY=$SCRATCH/$(basename "$1")
    each_node sh -c 'mkdir -p "$2" && cp -rL "$1" "$2"' sh "$(realpath "$1")" "$SCRATCH"
}

# train JOB [OPTIONS of train]: on all tasks of the job, from the newest checkpoint if the run directory has a run of JOB. Your own
# --resume counts until the job is requeued. When SLURM announces the end of the time (--signal=B:USR1@SECONDS), all ranks
# finish their step and write a checkpoint, and the job returns to the queue.
train() {
    local run options=() resume=() limit='' signalled='' pid code word last='' started='' own=''
    case "${1:-}" in -* | '') echo "the job file comes first: sbatch SCRIPT JOB [OPTIONS of train]" >&2; return 2 ;; esac
    run=$RUNS/$(basename "$1" .toml)
    for word in "${@:2}"; do
        case "$last $word" in
            "--run-dir "*) run=$word ;;
            *" --run-dir="*) run=${word#*=} ;;
            *" --resume" | *" --resume="*) own=yes ;;
        esac
        last=$word
    done
    [ "${SLURM_HET_SIZE:-1}" -gt 1 ] && options=("${PYTHONS[@]/#/--slurm-python=}")
    started=$(sed -n 's/^ "job_file": "\(.*\)",$/\1/p' "$run/run.json" 2> /dev/null)
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || { [ -z "$own" ] && [ "$started" -ef "$1" ]; }; then
        [ -n "$(find "$run/checkpoints" -name 'step-*.h5' -print -quit 2> /dev/null)" ] && resume=(--resume)
    fi
    "${PYTHONS[0]}" -m hetero_mpi launch --verbose "${options[@]}" -- train "$1" --run-dir "$run" "${@:2}" "${resume[@]}" &
    pid=$!
    trap 'limit=yes signalled=yes; kill -USR1 "$pid" 2> /dev/null' USR1
    wait "$pid"; code=$?
    while [ -n "$signalled" ]; do # the signal has ended the waiting, not the job
        signalled=''; wait "$pid"; code=$?
    done
    [ -n "${COPY:-}" ] && each_node rm -rf "$SCRATCH"
    # 76: stopped in order, with a checkpoint (docs/recovery.md).
    [ -n "$limit" ] && [ "$code" -eq 76 ] && echo "requeueing this job: it goes on by itself" && scontrol requeue "$SLURM_JOB_ID"
    return "$code"
}
