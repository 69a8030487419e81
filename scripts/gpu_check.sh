#!/usr/bin/env bash
# Tests and measures a packed build (scripts/gpu_pack.sh) on a machine with GPUs. Each phase writes a
# log to $OUT (default build/gpu) and prints its last lines.
set -uo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/gpu_check.sh PHASE...

  tests       ctest -L cuda, nothing skipped; FILTER (a regular expression) restricts it
  tests86     the same with the kernels that a GPU with 99 KB of shared memory runs
  tests4      the same with persistent kernels of four blocks, so that each block processes several tiles
  multi       ctest -L multi-gpu, nothing skipped
  scale       one GPU and two GPUs: the loss curve, and tokens/s of the 0.5B step
  memcheck    compute-sanitizer memcheck over the CUDA tests
  racecheck   compute-sanitizer racecheck over those of kernels and autograd; FILTER, PROGRAMS and LIMIT (seconds per test) restrict both
  ops         the op table and attention, compared with PyTorch's attention
  attention   bench/attention; FILTER restricts it, and BASE (a folder) adds another build for comparison
  steps       the training steps, compared with PyTorch's
  encoders    the steps of BERT-base and ViT-B/16, RUNS (2) times in turn with PyTorch's: compiled, and eager
  vit         images/s of vision transformers' forward pass beside PyTorch's; VIT_OPTIONS restricts the table ("--sizes Ti,S")
  embed       texts/s of `cohort embed` beside sentence-transformers', of MODEL (its folder); EMBED_OPTIONS
  sizes       the 124M step with sizes that are not multiples of 8, 64 or a head of 96, beside the next ones, RUNS (3) times in turn
  rollouts    decoding, rollouts and a GRPO step; sampled log-probs against training's; compared with transformers' generate if
              installed (PEER=0: without it); ONLY restricts both ("--only decode"), RUNS repeats samples that must have equal bits
  against     the training steps compared with those of another build, whose bench and cohort are in BASE (a folder)
  profile     GPU time of a training step by kernel (ncu)
  stalls      warp stalls of one launch of attention, by instruction (ncu): KERNEL (a regular expression), FILTER (the case)
  demo        configs/demo.yaml on the GPU
  defaults    300 GRPO steps with the defaults alone after the demo's supervised stage, seeds 0 to 2
  shakespeare nanoGPT's larger character setting in f32 and bf16
TEXT
}
[ $# -gt 0 ] || { usage >&2; exit 2; }

cd "$(dirname "${BASH_SOURCE[0]}")/.."
OUT=${OUT:-build/gpu}
mkdir -p "$OUT"
if [ -f build/travel/cohort.tar.xz ]; then
  python3 -c 'import tarfile; tarfile.open("build/travel/cohort.tar.xz").extractall("build/travel", filter="fully_trusted")'
  mkdir -p build/cuda && cp -r build/travel/build/. build/cuda/
  source_dir=$(cat build/travel/source_dir)
  [ -e "$source_dir" ] || { mkdir -p "$(dirname "$source_dir")" && ln -s "$PWD" "$source_dir"; }
fi
# COHORT_TEST_DATA, else the data of the packed build, else ../shared/data.
data=${COHORT_TEST_DATA:-build/travel/data}
[ -n "${COHORT_TEST_DATA-}" ] || [ -d "$data" ] || data=../shared/data
if ! COHORT_TEST_DATA=$(realpath -e "$data"); then
  echo "gpu_check.sh: no test data in $data; hint: set COHORT_TEST_DATA to their folder" >&2
  exit 2
fi
export COHORT_TEST_DATA
export NCCL_NVLS_ENABLE=0
cuda_tests='Cuda*.*:*/Cuda*.*-*Slow.*:*CudaMultiGpu*'
failed=0

# show_tail LOG: prints its last lines.
show_tail() { tail -n "${2:-25}" "$1"; }

run_tests() {  # LOG VARIABLE=VALUE...
  local log=$OUT/$1
  shift
  env "$@" COHORT_REQUIRE=gpu,data ctest --test-dir build/cuda -L '^cuda$' ${FILTER:+-R "$FILTER"} -j "${JOBS:-$(nproc)}" \
    --output-on-failure >"$log" 2>&1 || failed=1
  grep -c Skipped "$log" | sed 's/^/skipped lines: /'
  show_tail "$log" "${LINES_SHOWN:-60}"
}
run_multi() {
  COHORT_REQUIRE=gpu,multi-gpu,data ctest --test-dir build/cuda -L '^multi-gpu$' --output-on-failure >"$OUT/multi.log" 2>&1 || failed=1
  show_tail "$OUT/multi.log" 60
}
run_scale() {
  local gpus port=29511 rank ranks=()
  for gpus in 1 2; do
    build/cuda/cohort train configs/shakespeare_char_gpu.yaml $([ $gpus = 1 ] || echo --gpus $gpus) steps=50 micro_batch_tokens=8192 log_every=1 \
      eval.every=0 data.text="$COHORT_TEST_DATA/tinyshakespeare/input.txt" output_dir="$OUT/curve$gpus" >"$OUT/curve$gpus.log" 2>&1 || failed=1
    grep -h '"loss"' "$OUT/curve$gpus/metrics.jsonl" | sed -n '1p;2p;50p' | cut -c1-90
  done
  build/cuda/bench/cohort_bench_step bench/configs/qwen2_0_5b.yaml --vocab 151936 | grep -E '^(step|tokens)'
  for rank in 1 0; do
    RANK=$rank LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port timeout 100 \
      build/cuda/bench/cohort_bench_step bench/configs/qwen2_0_5b.yaml --vocab 151936 >"$OUT/scale$rank.log" 2>&1 &
    ranks+=($!)
  done
  wait "${ranks[0]}" || failed=1
  wait "${ranks[1]}" || failed=1
  cat "$OUT/scale0.log" "$OUT/scale1.log"
}
# Several tests per process and several processes at once: startup takes longer than most tests, and a
# slow test must not block the rest.
sanitize() {  # TOOL TESTS_PER_PROCESS FILTER PROGRAM...
  local tool=$1 batch=$2 filter=$3 program log=$OUT/$1
  shift 3
  rm -rf "$log"
  mkdir -p "$log"
  for program in "$@"; do
    "build/cuda/tests/$program" --gtest_list_tests --gtest_filter="$filter" |
      awk '/^[^ ]/ { suite = $1; next } { print suite $1 }' |
      awk -v program="$program" -v batch="$batch" \
        '{ line = line (line == "" ? program " " : ":") $1 } NR % batch == 0 { print line; line = "" } END { if (line != "") print line }'
  done >"$log/batches.txt"
  xargs -a "$log/batches.txt" -P "${JOBS:-$(nproc)}" -L 1 bash -c 'sanitize_batch "$@"' -- "$tool" "$log"
  echo "$tool: $(cut -d' ' -f2 "$log/batches.txt" | tr ':' '\n' | grep -c .) tests, $(cat "$log"/*.ok 2>/dev/null | tr ':' '\n' | grep -c .) without a finding"
  [ -s "$log/batches.txt" ] || failed=1
  cat "$log"/*.bad 2>/dev/null && failed=1
}
sanitize_batch() {  # TOOL FOLDER PROGRAM TEST:TEST:...
  local file rc=0 start=$SECONDS
  file=$2/$(echo "$3 $4" | md5sum | cut -c1-12)
  # API calls that fail on purpose in error tests are not findings.
  COHORT_REQUIRE=gpu,data COHORT_CUDA_CACHE=0 timeout "${LIMIT:-120}" compute-sanitizer --tool "$1" \
    --report-api-errors no --error-exitcode 9 \
    "build/cuda/tests/$3" --gtest_filter="$4" --gtest_brief=1 >"$file.log" 2>&1 || rc=$?
  # Ignores races inside cuBLAS kernels. Excluding these kernels can make the sanitizer itself fail.
  if [ $1-$rc = racecheck-9 ] &&
    grep -E 'Error:|Warning:|FAILED' "$file.log" | awk '!/nvjet/ { other = 1 } END { exit NR == 0 || other }'; then
    rc=0
  fi
  if [ $rc = 0 ]; then
    echo "$4" >"$file.ok"
  else
    echo "exit code $rc after $((SECONDS - start)) s: $3 $4: $(grep -m1 -E 'Error:|Warning:|SUMMARY|FAILED' "$file.log")" >"$file.bad"
  fi
}
export -f sanitize_batch
run_ops() {
  build/cuda/bench/cohort_bench_ops --device cuda --dtype bf16 >"$OUT/ops.log" 2>&1 || failed=1
  python3 bench/peers/attention.py >"$OUT/attention_peer.log" 2>&1 || failed=1
  sleep 3
  build/cuda/bench/cohort_bench_ops --device cuda --dtype bf16 --filter attention >>"$OUT/ops.log" 2>&1 || failed=1
  cat "$OUT/ops.log" "$OUT/attention_peer.log"
}
run_attention() {
  bench/attention --filter "${FILTER:-}" ${BASE:+--against "$BASE/bench/cohort_bench_attention"} --json "$OUT/attention.json" >"$OUT/attention.log" 2>&1 || failed=1
  cat "$OUT/attention.log"
}
run_steps() {
  local shape vocab
  for shape in gpt2_124m:50304 qwen2_0_5b:151936; do
    vocab=${shape#*:} shape=${shape%:*}
    build/cuda/bench/cohort_bench_step "bench/configs/$shape.yaml" --vocab "$vocab" ${STEP_OVERRIDES:-} >"$OUT/step_$shape.log" 2>&1 || failed=1
    sleep 3
    python3 bench/peers/train_step.py "$shape" >"$OUT/peer_$shape.log" 2>&1 || failed=1
    sleep 3
    build/cuda/bench/cohort_bench_step "bench/configs/$shape.yaml" --vocab "$vocab" model.recompute=cheap ${STEP_OVERRIDES:-} >"$OUT/step_${shape}_cheap.log" 2>&1 || failed=1
    echo "-- $shape; with recompute: cheap; PyTorch"
    show_tail "$OUT/step_$shape.log" 30
    head -n 7 "$OUT/step_${shape}_cheap.log"
    show_tail "$OUT/peer_$shape.log" 1
  done
}
run_encoders() {
  local round shape options
  for round in $(seq "${RUNS:-2}"); do
    while read -r shape options; do
      echo "-- $round ours $shape"
      build/cuda/bench/cohort_bench_step "bench/configs/$shape.yaml" --vocab 30522 $([ "$round" = 1 ] || echo --no-ops) ${STEP_OVERRIDES:-} 2>&1 </dev/null || failed=1
      sleep 3
      echo "-- $round $shape $options"
      python3 bench/peers/train_step.py "$shape" $options 2>&1 </dev/null | tail -n 3 || failed=1
      sleep 3
    done <<'ROWS'
bert_base --heads targets
bert_base
bert_base --heads targets --eager
vit_b16
vit_b16 --eager
ROWS
  done >"$OUT/encoders.txt"
  cat "$OUT/encoders.txt"
}
run_vit() {
  python3 bench/vit_table.py ${VIT_OPTIONS:-} >"$OUT/vit.txt" 2>"$OUT/vit.log" || { failed=1; show_tail "$OUT/vit.log"; }
  cat "$OUT/vit.txt"
}
run_embed() {
  local dtype
  for dtype in f32 bf16; do
    python3 bench/peers/embed.py "${MODEL:?names a folder of MiniLM}" "$COHORT_TEST_DATA/encoder/speakers.jsonl" --dtype $dtype \
      ${EMBED_OPTIONS:-} 2>"$OUT/embed.log" || { failed=1; show_tail "$OUT/embed.log"; }
  done
}
# Rows of one comparison follow each other: the vocabulary and overrides of a run.
run_sizes() {
  local round vocab overrides
  for round in $(seq "${RUNS:-3}"); do
    while read -r vocab overrides; do
      echo "-- $round --vocab $vocab $overrides"
      build/cuda/bench/cohort_bench_step bench/configs/gpt2_124m.yaml --vocab "$vocab" $overrides 2>&1 </dev/null | grep -E '^(step|tokens/s|head_logprob)' || failed=1
      sleep 3
    done <<'ROWS'
50304
50257
50304 model.d_model=1000 model.num_heads=15 model.head_dim=64
50304 model.d_model=1002 model.num_heads=15 model.head_dim=64
50304 model.d_model=1024 model.num_heads=15 model.head_dim=64
50304 model.d_ff=2730
50304 model.d_ff=2736
50304 model.d_ff=2752
50304 model.d_model=960 model.num_heads=12
50304 model.d_model=960 model.num_heads=10
ROWS
  done >"$OUT/sizes.txt"
  cat "$OUT/sizes.txt"
}
run_rollouts() {
  build/cuda/bench/cohort_bench_grpo bench/configs/qwen2_0_5b.yaml --vocab 151936 --json "$OUT/rollouts.json" --runs "${RUNS:-3}" ${ONLY:-} >"$OUT/rollouts.log" 2>&1 || failed=1
  show_tail "$OUT/rollouts.log"
  [ "${PEER:-1}" != 0 ] || return
  python3 -c 'import torch, transformers; print("-- PyTorch", torch.__version__, "and transformers", transformers.__version__)' 2>/dev/null ||
    { echo "-- no PyTorch or no transformers: no comparison"; return; }
  sleep 3
  python3 bench/peers/generate.py ${ONLY:-} >"$OUT/rollouts_peer.log" 2>&1 || failed=1
  show_tail "$OUT/rollouts_peer.log"
}
# Alternates the builds with pauses: (BASE, this build) three times.
run_against() {
  local base=${BASE:?names the folder of the other build} round build shape
  for round in 1 2 3; do
    for build in "$base" build/cuda; do
      for shape in gpt2_124m:50304 qwen2_0_5b:151936; do
        echo "-- $round $build ${shape%:*}"
        "$build/bench/cohort_bench_step" "bench/configs/${shape%:*}.yaml" --vocab "${shape#*:}" 2>&1 | grep -E '^(tokens/s|step)'
        sleep 3
      done
      "$build/cohort" train configs/demo.yaml device=cuda stages.0.steps=50 stages.1.steps=200 eval.every=0 \
        output_dir="$OUT/against-$round-$(basename "$build")" >"$OUT/against.log" 2>&1 || failed=1
      grep -h -o '"step_time":[^,}]*' "$OUT/against-$round-$(basename "$build")/2-grpo/metrics.jsonl" | cut -d: -f2 |
        sort -n | awk '{ t[NR] = $1 } END { print "GRPO step of the demo, median of " NR ": " t[int((NR + 1) / 2)] " s" }'
    done
  done >"$OUT/against.txt"
  cat "$OUT/against.txt"
}
# Kernels by total time over about one step, after the warm-up.
run_profile() {
  local shape=${SHAPE:-qwen2_0_5b} vocab=${VOCAB:-151936}
  ncu --clock-control none --metrics gpu__time_duration.sum --launch-skip "${SKIP:-4000}" --launch-count "${COUNT:-2000}" --csv \
    build/cuda/bench/cohort_bench_step "bench/configs/$shape.yaml" --vocab "$vocab" ${STEP_OVERRIDES:-} >"$OUT/profile_$shape.csv" 2>"$OUT/profile.err" || failed=1
  python3 - "$OUT/profile_$shape.csv" <<'PYTHON'
import collections, csv, re, sys
lines = [line for line in open(sys.argv[1]) if line.startswith('"')]
total, count = collections.Counter(), collections.Counter()
for row in csv.DictReader(lines):
    name = re.sub(r"\(.*", "", row["Kernel Name"])[:70]
    unit = {"ns": 1e-3, "us": 1.0, "ms": 1e3}[row["Metric Unit"]]
    total[name] += float(row["Metric Value"].replace(",", "")) * unit
    count[name] += 1
print(f"{sum(total.values()) / 1e3:10.2f} ms in {sum(count.values())} kernels")
for name, us in total.most_common(30):
    print(f"{us / 1e3:10.2f} ms {count[name]:6d} x {us / count[name]:9.1f} us  {name}")
PYTHON
}
# Instructions with at least 0.7 % of the samples, in program order, with their stall reasons; then samples by opcode.
run_stalls() {
  ncu --clock-control none --section SourceCounters --import-source no -k "regex:${KERNEL:-forward_sm90}" --launch-skip 3 --launch-count 1 \
    -f -o "$OUT/stalls" build/cuda/bench/cohort_bench_attention --filter "${FILTER:-d128 full 4k}" >"$OUT/stalls.log" 2>&1 &&
    ncu -i "$OUT/stalls.ncu-rep" --page source --csv >"$OUT/stalls.csv" 2>>"$OUT/stalls.log" || { failed=1; show_tail "$OUT/stalls.log"; return; }
  python3 - "$OUT/stalls.csv" <<'PYTHON'
import collections, csv, sys
lines = [line for line in open(sys.argv[1]) if line.startswith('"')]
rows = list(csv.DictReader(lines[next(i for i, line in enumerate(lines) if line.startswith('"Address"')):]))
samples = lambda row: int(row["# Samples"] or 0)
total = sum(map(samples, rows))
reasons = [name for name in rows[0] if name.startswith("stall_") and "Not Issued" not in name]
for i, row in enumerate(rows):
    if samples(row) < 0.007 * total:
        continue
    most = sorted(((int(row[name] or 0), name[6:]) for name in reasons), reverse=True)[:2]
    print(f"{i:6d} {100 * samples(row) / total:5.1f} % {row['Source'].strip()[:70]:70s} "
          + ", ".join(f"{name} {100 * count / total:.1f}" for count, name in most))
kinds = collections.Counter()
for row in rows:
    words = [word for word in row["Source"].split() if not word.startswith("@")]
    kinds[words[0].split(".")[0]] += samples(row)
print(", ".join(f"{kind} {100 * count / total:.1f} %" for kind, count in kinds.most_common(12)))
PYTHON
}
run_demo() {
  build/cuda/cohort train configs/demo.yaml device=cuda output_dir="$OUT/demo" >"$OUT/demo.log" 2>&1 || failed=1
  show_tail "$OUT/demo.log" 30
}
run_defaults() {
  local seed
  cat >"$OUT/defaults.yaml" <<'YAML'
trainer: grpo
steps: 300
device: cuda
data: {task: parity, task_sizes: {min_size: 14, max_size: 14, worked_share: 0.2}}
rewards: [{name: task}]
YAML
  for seed in 0 1 2; do
    build/cuda/cohort train configs/demo.yaml device=cuda seed=$seed stages.1.steps=1 output_dir="$OUT/start$seed" >"$OUT/start$seed.log" 2>&1 || failed=1
    build/cuda/cohort train "$OUT/defaults.yaml" seed=$seed init_from="$OUT/start$seed/1-sft" output_dir="$OUT/defaults$seed" >"$OUT/defaults$seed.log" 2>&1 || failed=1
    grep -h '"eval":true' "$OUT/defaults$seed/metrics.jsonl" | cut -c1-110
    grep ' W\] ' "$OUT/defaults$seed.log"
  done
}
run_shakespeare() {
  local dtype
  for dtype in ${DTYPES:-bf16 f32}; do
    build/cuda/cohort train configs/shakespeare_char_gpu.yaml dtype=$dtype \
      data.text="$COHORT_TEST_DATA/tinyshakespeare/input.txt" output_dir="$OUT/shakespeare-$dtype" >"$OUT/shakespeare-$dtype.log" 2>&1 || failed=1
    show_tail "$OUT/shakespeare-$dtype.log" 4
    grep -h '"eval":true' "$OUT/shakespeare-$dtype/metrics.jsonl" | tail -25
  done
}

for phase in "$@"; do
  start=$SECONDS
  echo "==== $phase"
  case $phase in
    tests) run_tests ctest.log ;;
    tests86) run_tests ctest86.log COHORT_COMPUTE_CAPABILITY=8.6 ;;
    tests4) run_tests ctest4.log COHORT_MULTIPROCESSORS=4 ;;
    multi) run_multi ;;
    scale) run_scale ;;
    memcheck) sanitize memcheck 6 "${FILTER:-$cuda_tests}" ${PROGRAMS:-trainers_test core_test kernels_test autograd_test nn_test rl_test} ;;
    racecheck) sanitize racecheck 1 "${FILTER:-$cuda_tests}" ${PROGRAMS:-kernels_test autograd_test} ;;
    ops) run_ops ;;
    attention) run_attention ;;
    steps) run_steps ;;
    encoders) run_encoders ;;
    vit) run_vit ;;
    embed) run_embed ;;
    sizes) run_sizes ;;
    rollouts) run_rollouts ;;
    against) run_against ;;
    profile) run_profile ;;
    stalls) run_stalls ;;
    demo) run_demo ;;
    defaults) run_defaults ;;
    shakespeare) run_shakespeare ;;
    *) usage >&2; exit 2 ;;
  esac
  echo "---- $phase: $((SECONDS - start)) s"
done
exit $failed
