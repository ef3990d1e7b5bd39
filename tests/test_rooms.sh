#!/usr/bin/env bash
# Holds every #include of the library and its kernels against the rooms of CMakeLists.txt: a file may include what lies in
# its own folder and in those that its room uses. Ends with the lines that break this.
#     tests/test_rooms.sh build/generated/rooms
set -euo pipefail
export LC_ALL=C
rooms=$(realpath "$1")
cd "$(dirname "$0")/.."

# wrong_includes: of the tree in this folder, FILE:LINE: what is wrong.
wrong_includes() {
    find core graph ops models tools -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cpp' | sort |
        xargs awk -v rooms="$rooms" '
        function folder(path) { return sub(/\/[^\/]*$/, "", path) ? path : "" }
        BEGIN {
            while ((getline line < rooms) > 0) {
                n = split(line, names, " ")
                room[names[1]]
                for (i = 1; i <= n; i++) may[names[1], names[i]]
            }
            if (!n) print rooms ": no rooms"
        }
        FNR == 1 {
            here = folder(FILENAME)
            if (here !~ /^tools/ && !(here in room)) print FILENAME ":1: " here " is no room of CMakeLists.txt"
        }
        /^[ \t]*#[ \t]*include[ \t]*"[^"]*\// {
            split($0, parts, "\"")
            there = folder(parts[2])
            if (there ~ /^tests/ || here !~ /^tools/ && !((here, there) in may))
                print FILENAME ":" FNR ": " here " may not include " parts[2]
        }'
}

wrong=$(wrong_includes)
if [ -n "$wrong" ]; then
    printf '%s\n' "$wrong"
    exit 1
fi

# and it finds an arrow that points up, and a folder that is no room
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
mkdir -p "$dir"/{core/base,core/attic,graph,ops,models,tools}
printf '#include "core/base/error.h"\n  # include "graph/op.h"\n' >"$dir/core/base/tensor.c"
printf '#include "core/base/error.h"\n' >"$dir/core/attic/trunk.c"
printf '#include "tests/support.h"\n' >"$dir/tools/train.c"
cd "$dir"
expected='core/attic/trunk.c:1: core/attic is no room of CMakeLists.txt
core/attic/trunk.c:1: core/attic may not include core/base/error.h
core/base/tensor.c:2: core/base may not include graph/op.h
tools/train.c:1: tools may not include tests/support.h'
found=$(wrong_includes)
[ "$found" = "$expected" ] || { printf 'found in a planted tree:\n%s\nexpected:\n%s\n' "$found" "$expected"; exit 1; }
