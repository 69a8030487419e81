#!/usr/bin/env bash
# Trains the same small model, causal or of masked tokens, with each position scheme on a text, and compares held-out loss, loss
# beyond the trained length or accuracy, speed and memory. The last lines are a table; curves are in OUT/report.html.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: scripts/compare_positions.sh TEXT [options] [-- key=value...]

Trains configs/positions/shakespeare.yaml on the file TEXT with each scheme and seed, evaluates each model where its held-out loss
was lowest, at 1, 2 and 4 times the trained length, writes OUT/table.tsv and OUT/report.html (cohort report), and prints the
table: means over the seeds.

  --mlm             configs/positions/shakespeare_mlm.yaml instead, a small BERT, on a BPE of 1,024 tokens that OUT/tokenizer gets
                    from the text; loss and accuracy of masked tokens instead of losses at 2 and 4 times the length
  --program FILE    the cohort command (default: build/cuda/cohort, else build/cpu/cohort)
  --schemes LIST    of model.position (default: all)
  --seeds LIST      default "0 1 2"
  --out DIR         default runs/positions (--mlm: runs/positions_mlm); runs that are complete are not trained again
  --help            print this text

Keys are for all runs, such as device=cuda dtype=bf16, or steps=200 model.d_model=128 on a CPU.
TEXT
}
bad_usage() {
  echo "compare_positions.sh: $1" >&2
  usage >&2
  exit 2
}

text= program= out= seeds="0 1 2" config=configs/positions/shakespeare.yaml mlm=
schemes="learned sinusoidal rope alibi t5 exposb none"
while [ $# -gt 0 ]; do
  case "$1" in
    --program | --schemes | --seeds | --out)
      [ $# -ge 2 ] || bad_usage "$1 needs a value"
      declare "${1#--}=$2"
      shift 2 ;;
    --mlm) mlm=yes config=configs/positions/shakespeare_mlm.yaml; shift ;;
    -h | --help) usage; exit 0 ;;
    --) shift; break ;;
    -*) bad_usage "unknown option '$1'" ;;
    *) [ -z "$text" ] || bad_usage "unknown argument '$1' (keys go after --)"; text=$1; shift ;;
  esac
done
[ -n "$text" ] || bad_usage "no text given"
[ -r "$text" ] || bad_usage "cannot read '$text'"
text=$(realpath "$text") out=$(realpath -m "${out:-runs/positions${mlm:+_mlm}}")
[ -z "$program" ] || program=$(realpath "$program")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "$program" ]; then
  program=build/cuda/cohort
  [ -x "$program" ] || program=build/cpu/cohort
fi
[ -x "$program" ] || bad_usage "there is no '$program'; hint: scripts/build.sh cpu"
context=256 lengths="1 2 4" columns="loss\tloss at 2x\tloss at 4x"
[ -z "$mlm" ] || context=128 lengths=1 columns="loss\taccuracy"

# last KEY FILE: the last value of a key in metrics.jsonl.
last() {
  { grep -o "\"$1\":[^,}]*" "$2" || true; } | tail -n 1 | cut -d : -f 2
}

mkdir -p "$out"
keys=("data.text=$text" "$@")
if [ -n "$mlm" ]; then
  [ -e "$out/tokenizer/tokenizer.json" ] ||
    "$program" tokenizer train "$text" --vocab-size 1024 --special '<|endoftext|>' --special '<mask>' --output "$out/tokenizer" >"$out/tokenizer.log"
  keys+=("data.tokenizer_path=$out/tokenizer")
fi
results=$out/results.tsv
: >"$results"
for scheme in $schemes; do
  for seed in $seeds; do
    run=$out/$scheme-$seed
    if ! [ -e "$run/done" ]; then
      rm -rf "$run"
      "$program" train "$config" "${keys[@]}" "model.position=$scheme" "seed=$seed" \
        "output_dir=$run" "name=$scheme, seed $seed" >"$out/$scheme-$seed.log" 2>&1 ||
        { tail -n 5 "$out/$scheme-$seed.log" >&2; exit 1; }
      touch "$run/done"
    fi
    best=$(readlink -f "$(find "$run" -name best)")
    losses=
    for times in $lengths; do
      # A table of learned positions ends at the trained length.
      loss=-
      if [ $times = 1 ] || [ "$scheme" != learned ]; then
        "$program" eval "$best" "model.context=$((times * context))" "$@" >"$out/eval.log" 2>&1 ||
          { tail -n 5 "$out/eval.log" >&2; exit 1; }
        loss=$(last val_loss "$out/eval.log")
      fi
      losses+=$'\t'$loss
    done
    [ -z "$mlm" ] || losses+=$'\t'$(last accuracy "$out/eval.log")
    metrics=$(find "$run" -name metrics.jsonl | head -n 1)
    memory=$("$program" check "$config" "${keys[@]}" "model.position=$scheme" 2>&1 |
      sed -n 's/.*peak per rank *\([0-9.]*\) MiB.*/\1/p')
    printf '%s\t%s\t%s%s\t%s\t%s\n' "$scheme" "$seed" "$((10#${best##*-}))" "$losses" "$(last tokens_per_second "$metrics")" "$memory" | tee -a "$results"
  done
done

# Means over the seeds, in the order of the schemes.
awk -F '\t' -v columns="$columns" '
  BEGIN { print "scheme\tstep\t" columns "\ttokens/s\tMiB" }
  !($1 in runs) { order[++count] = $1 }
  { ++runs[$1]; last = NF; for (i = 3; i <= NF; ++i) if ($i == "-" || $i == "") none[$1, i] = 1; else sum[$1, i] += $i }
  END {
    for (n = 1; n <= count; ++n) {
      line = order[n]
      for (i = 3; i <= last; ++i)
        line = line "\t" (none[order[n], i] ? "-" : sprintf(i == 3 || i > last - 2 ? "%.0f" : "%.4f", sum[order[n], i] / runs[order[n]]))
      print line
    }
  }' "$results" >"$out/table.tsv"
# shellcheck disable=SC2086
"$program" report $(for scheme in $schemes; do echo "$out/$scheme-${seeds%% *}"; done) --output "$out/report.html" >/dev/null
echo
awk -F '\t' '{ printf "%-16s", $1; for (i = 2; i <= NF; ++i) printf "%12s", $i; print "" }' "$out/table.tsv"
