//! The command that repeats a random test alone, with the cases that failed.

use std::cell::Cell;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use proptest::test_runner::{Config, RngSeed};

/// The variables of proptest with the seed, and with the number of cases.
const SEED: &str = "PROPTEST_RNG_SEED";
const CASES: &str = "PROPTEST_CASES";

thread_local! {
    /// The seed of this thread's test.
    static OF_TEST: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The seed of this thread's test: that of `PROPTEST_RNG_SEED`, otherwise a random one, so that a failure can name it.
pub(crate) fn seed() -> u64 {
    let new = || match Config::default().rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => RandomState::new().hash_one(SEED),
    };
    let seed = OF_TEST.get().unwrap_or_else(new);
    OF_TEST.set(Some(seed));
    seed
}

/// The command that repeats this thread's test with this seed and number of cases.
pub(crate) fn command(seed: u64, cases: Option<&str>) -> String {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| ".".into(), std::path::PathBuf::from);
    let binary = std::env::current_exe().unwrap_or_default();
    let thread = std::thread::current();
    command_of(&package, &binary, thread.name(), seed, cases)
}

/// The command for a test binary of the package in this folder. libtest gives a thread the name of its test.
fn command_of(package: &Path, binary: &Path, thread: Option<&str>, seed: u64, cases: Option<&str>) -> String {
    let cases = cases.map(|cases| format!("{CASES}={cases} ")).unwrap_or_default();
    let manifest = std::fs::read_to_string(package.join("Cargo.toml")).unwrap_or_default();
    let name = manifest.lines().find_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"'));
    let name = name.map(|name| format!(" -p {name}")).unwrap_or_default();
    let target = target(package, binary).unwrap_or_default();
    // With one thread for all tests, the name is that of the program's first thread.
    let test = thread.filter(|name| *name != "main");
    let test = test.map(|test| format!(" {test} -- --exact")).unwrap_or_default();
    format!("{SEED}={seed} {cases}cargo test{name}{target}{test}")
}

/// The option of cargo for a binary, whose file is named after the target and a hash.
fn target(package: &Path, binary: &Path) -> Option<String> {
    let (name, _hash) = binary.file_stem()?.to_str()?.rsplit_once('-')?;
    let tests = package.join("tests");
    let is_test = tests.join(format!("{name}.rs")).exists() || tests.join(name).join("main.rs").exists();
    Some(match (is_test, package.join("src/lib.rs").exists()) {
        (true, _) => format!(" --test {name}"),
        (false, true) => " --lib".to_owned(),
        (false, false) => format!(" --bin {name}"),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_command_names_package_binary_and_test() {
        let folder = tempfile::tempdir().unwrap();
        let package = folder.path();
        for name in ["tests/one", "src"] {
            fs::create_dir_all(package.join(name)).unwrap();
        }
        fs::write(package.join("Cargo.toml"), "[package]\nname = \"tortie-x\"\n").unwrap();
        for file in ["tests/one/main.rs", "tests/two.rs", "src/main.rs"] {
            fs::write(package.join(file), "").unwrap();
        }
        let command = |binary: &str, thread, cases| {
            command_of(package, &Path::new("/target/debug/deps").join(binary), thread, 7, cases)
        };
        for (binary, target) in
            [("one-0a1b", "--test one"), ("two-0a1b", "--test two"), ("x-0a1b", "--bin x")]
        {
            let expected = format!("PROPTEST_RNG_SEED=7 cargo test -p tortie-x {target} m::t -- --exact");
            assert_eq!(command(binary, Some("m::t"), None), expected);
        }
        fs::write(package.join("src/lib.rs"), "").unwrap();
        let expected = "PROPTEST_RNG_SEED=7 PROPTEST_CASES=9 cargo test -p tortie-x --lib";
        assert_eq!(command("tortie_x-0a1b", Some("main"), Some("9")), expected);
        assert_eq!(command("tortie_x-0a1b", None, Some("9")), expected);
    }

    #[test]
    fn a_test_keeps_its_seed() {
        assert_eq!(seed(), seed());
    }
}
