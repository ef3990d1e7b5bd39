# Shared by tools/quickstart and tools/test, which source it from the top of the checkout: installs what is
# missing and builds. Asks apt for nothing when everything is there.

say() { printf '== %s\n' "$*"; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

CMAKE_MINIMUM=$(sed -n 's/^cmake_minimum_required(VERSION \([0-9.]*\)).*/\1/p' CMakeLists.txt)
CMAKE_VENV=$PWD/build-tools/cmake # a newer CMake lands here where the distribution's is too old
APT_LOG=$PWD/build/apt.log

# Is the dotted version $1 at least $2?
version_ge() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }

have() { command -v "$1" >/dev/null 2>&1; }

have_package() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>/dev/null)" = installed ]; }

have_cmake() {
    [ ! -x "$CMAKE_VENV/bin/cmake" ] || PATH=$CMAKE_VENV/bin:$PATH
    have cmake && have ctest &&
        version_ge "$(cmake --version | sed -n '1s/^cmake version \([0-9.]*\).*/\1/p')" "$CMAKE_MINIMUM"
}

# Sets MISSING to the packages that building (and testing, given "test") still needs; "cmake" may be among them.
find_missing() {
    MISSING=
    have gcc || MISSING="$MISSING gcc"
    have make || have ninja || MISSING="$MISSING make"
    have_cmake || MISSING="$MISSING cmake"
    have pkg-config || MISSING="$MISSING pkg-config"
    for package in libc6-dev libdnnl-dev libsleef-dev libjansson-dev zlib1g-dev; do
        have_package $package || MISSING="$MISSING $package"
    done
    if [ "${1:-}" = test ]; then
        have g++ || MISSING="$MISSING g++"
        for package in check libsubunit-dev; do
            have_package $package || MISSING="$MISSING $package"
        done
    fi
    MISSING=${MISSING# }
}

# Runs a command with its output in the log; shows the end of the log when it fails.
logged() {
    log=$1
    shift
    if ! "$@" >>"$log" 2>&1 </dev/null; then
        printf '%s\n' "--- failed: $* (end of $log)" >&2
        tail -n 40 "$log" >&2
        return 1
    fi
}

apt() {
    set -- env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300 "$@"
    [ "$(id -u)" = 0 ] || set -- sudo "$@"
    logged "$APT_LOG" "$@"
}

# The distribution's CMake is too old: takes pip's, in a virtual environment of its own.
install_cmake_with_pip() {
    say "this release has no CMake >= $CMAKE_MINIMUM: installing pip's cmake package into ${CMAKE_VENV#"$PWD"/}"
    have_package python3-venv || apt install -y --no-install-recommends python3-venv || return 1
    logged "$APT_LOG" python3 -m venv --clear "$CMAKE_VENV" &&
        logged "$APT_LOG" "$CMAKE_VENV/bin/python3" -m pip install "cmake>=$CMAKE_MINIMUM" && have_cmake
}

# install_packages [test]
install_packages() {
    if [ "$(uname -s)" != Linux ] || ! have apt-get || ! have dpkg-query; then
        die "this script installs with apt on Debian or Ubuntu; on this system please install a C17 compiler with" \
            "OpenMP, make, pkg-config, CMake >= $CMAKE_MINIMUM, oneDNN, SLEEF, Jansson, zlib and (for the tests) Check," \
            "then run: cmake -S . -B build && cmake --build build"
    fi
    find_missing "$@"
    [ -n "$MISSING" ] || return 0
    if [ "$(id -u)" != 0 ] && ! have sudo; then
        die "missing and not installable without root or sudo: please have these packages installed: $MISSING" \
            "(cmake at version $CMAKE_MINIMUM or newer)"
    fi
    mkdir -p build
    : >"$APT_LOG"
    say "installing $MISSING"
    # A failed update is no reason to stop: the package lists already here may do.
    apt update || say "apt-get update failed; going on with the package lists at hand"
    pip_cmake=no
    case " $MISSING " in
    *" cmake "*)
        version=$(LC_ALL=C apt-cache policy cmake | sed -n 's/^ *Candidate: \([0-9.]*\).*/\1/p')
        if [ -n "$version" ] && ! version_ge "$version" "$CMAKE_MINIMUM"; then
            pip_cmake=yes
            MISSING=$(printf ' %s ' "$MISSING" | sed 's/ cmake / /; s/^ *//; s/ *$//')
        fi
        ;;
    esac
    if [ -n "$MISSING" ]; then
        # shellcheck disable=SC2086 # one word a package
        apt install -y --no-install-recommends $MISSING || die "could not install: $MISSING" \
            "(on Ubuntu some of them are in the component universe)"
    fi
    if [ $pip_cmake = yes ]; then
        install_cmake_with_pip || die "CMake >= $CMAKE_MINIMUM is missing and this release has $version; please" \
            "install a newer one, for example: python3 -m venv $CMAKE_VENV &&" \
            "$CMAKE_VENV/bin/pip install 'cmake>=$CMAKE_MINIMUM'"
    fi
    hash -r
    find_missing "$@"
    [ -z "$MISSING" ] || die "installed, and still not found: $MISSING"
}

# build FOLDER [CMake options]: configures and builds; quiet unless it fails or warns.
build() {
    folder=$1
    shift
    mkdir -p "$folder"
    : >"$folder/build.log"
    cache=$folder/CMakeCache.txt
    if [ -f "$cache" ]; then
        # A build folder that came along with a copied or moved checkout would be refused: start it anew.
        # So would one whose make or ninja is gone.
        program=$(sed -n 's/^CMAKE_MAKE_PROGRAM:[A-Z]*=//p' "$cache")
        grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD" "$cache" && [ -x "$program" ] ||
            rm -rf "$cache" "$folder/CMakeFiles"
    fi
    if [ ! -f "$cache" ] && have ninja; then
        set -- "$@" -G Ninja
    fi
    say "building $folder"
    export CC=${CC:-gcc} # not another "cc" that may lack OpenMP
    logged "$folder/build.log" cmake -S . -B "$folder" "$@" || die "CMake could not configure $folder"
    logged "$folder/build.log" cmake --build "$folder" --parallel "$(nproc)" || die "could not build $folder"
    warnings=$(grep -c 'warning:' "$folder/build.log" || true)
    [ "$warnings" = 0 ] || say "$warnings compiler warnings: see $folder/build.log"
}
