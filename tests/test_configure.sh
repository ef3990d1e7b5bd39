#!/bin/sh
# A build folder has the same tests whatever the machine lacks: configured where no C++ compiler is to be found, those
# that need one are registered as skipped, with the reason; configured again where there is one, they are built.
#
#     tests/test_configure.sh CMAKE C-COMPILER
set -eu
cmake=$1 compiler=$2
source=$(cd "$(dirname "$0")/.." && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
fail() {
    echo "test_configure: $*" >&2
    exit 1
}

# A PATH of all programs of this one, as links, but for compilers of C++ and CUDA. The first of a name counts.
mkdir "$folder/bin"
IFS=:
for place in $PATH; do
    ln -s "$place"/* "$folder/bin/" 2>/dev/null || true
done
unset IFS
rm -f "$folder"/bin/*++* "$folder"/bin/nvcc*

# configure PATH: what is registered, one a line.
configure() {
    env -u CXX PATH="$1" CC="$compiler" "$cmake" -S "$source" -B "$folder/build" -DCSAGRAD_CUDA=OFF \
        >"$folder/log" 2>&1 || fail "CMake could not configure: $(cat "$folder/log")"
    sed -n 's/^add_test(\[*=*\[*\([a-z0-9_]*\).*/\1/p' "$folder/build/tests/CTestTestfile.cmake" | sort
}
configure "$folder/bin" >"$folder/bare"
skips=$(grep -c 'skipped: there is no C++ compiler' "$folder/build/tests/CTestTestfile.cmake" || true)
[ "$skips" -ge 5 ] || fail "without a C++ compiler, $skips tests are skipped for it"
sort "$folder/build/tests/expected" | cmp - "$folder/bare" || fail "the tests are not those that are expected"

configure "$PATH" >"$folder/full"
cmp "$folder/bare" "$folder/full" || fail "the tests differ with a C++ compiler"
if command -v g++ >/dev/null || command -v c++ >/dev/null || command -v clang++ >/dev/null; then
    ! grep 'skipped: there is no C++ compiler' "$folder/build/tests/CTestTestfile.cmake" ||
        fail "a C++ compiler that came later is not found"
fi

# An op whose table is not written as the build looks for it must stop the configuration.
mkdir "$folder/copy"
for part in CMakeLists.txt core graph ops models tools tests; do cp -R "$source/$part" "$folder/copy"; done
sed -i 's/^const cg_op cg_op_relu_grad =/const  cg_op cg_op_relu_grad =/' "$folder/copy/ops/nn/relu.c"
if CC="$compiler" "$cmake" -S "$folder/copy" -B "$folder/lost" -DCSAGRAD_CUDA=OFF >"$folder/log" 2>&1 ||
    ! grep -q 'ops/nn/relu.c: each table of an op' "$folder/log"; then
    fail "an op vanishes: $(cat "$folder/log")"
fi
