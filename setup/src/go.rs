//! Go, which builds the Kubernetes binaries for tests.
//!
//! The modules in `tests/kube` and `tests/e2e` name the version that they need. Any Go can provide it: an older one downloads the
//! toolchain as a module, which Go's checksum database verifies. So Debian's package, however old, is enough.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, Result, bail};
use test_programs::{CNI, GoModule, HELM, KUBE, System};

use crate::packages;

/// Where Go may be, in addition to the folders of `PATH`: its own archive, and Debian's package.
const FOLDERS: [&str; 2] = ["/usr/local/go/bin", "/usr/lib/go/bin"];

/// Builds the Kubernetes binary, the driver of CNI plugins and Helm, unless they exist, and returns the path of the first.
///
/// # Errors
/// Go fails, or cannot be installed.
pub fn build_kube() -> Result<PathBuf> {
    build(&CNI)?;
    build(&HELM)?;
    build(&KUBE)?;
    Ok(KUBE.binary("kube")?)
}

/// Builds the binaries of a module that do not exist, neither in the target folder nor in the user's cache.
///
/// # Errors
/// Go fails, or cannot be installed.
pub fn build(module: &GoModule) -> Result<()> {
    for (name, package) in module.binaries {
        let binary = module.binary(name)?;
        if binary.exists() {
            continue;
        }
        let cached = module.cached(name)?.unwrap_or_else(|| binary.clone());
        if !cached.exists() {
            build_binary(module, name, package, &cached)?;
        }
        if cached != binary {
            link(&cached, &binary)?;
        }
        remove_others(&binary, |_| true)?;
        remove_others(&cached, is_unused)?;
    }
    Ok(())
}

/// The binaries of modules that neither the target folder nor the user's cache has.
///
/// # Errors
/// The sources of a module cannot be read.
pub fn missing(modules: &[GoModule]) -> Result<Vec<&'static str>> {
    let mut missing = Vec::new();
    for module in modules {
        for (name, _) in module.binaries {
            let is_cached = module.cached(name)?.is_some_and(|cached| cached.exists());
            if !is_cached && !module.binary(name)?.exists() {
                missing.push(*name);
            }
        }
    }
    Ok(missing)
}

/// Makes the file of the cache appear in the target folder, at once as a whole.
fn link(cached: &Path, binary: &Path) -> Result<()> {
    let part = part_of(binary)?;
    if fs::hard_link(cached, &part).is_err() {
        // The cache is on another file system.
        fs::copy(cached, &part).with_context(|| format!("copying {}", cached.display()))?;
    }
    fs::rename(&part, binary).with_context(|| format!("renaming {}", part.display()))?;
    // So that it counts as used.
    fs::File::open(cached)?.set_modified(SystemTime::now())?;
    Ok(())
}

/// The unfinished file beside this one. Its folder exists.
fn part_of(binary: &Path) -> Result<PathBuf> {
    let folder = binary.parent().context("the binary has no folder")?;
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let name = binary.file_name().context("the binary has no name")?.to_string_lossy();
    Ok(folder.join(format!("{name}.{}.part", std::process::id())))
}

fn build_binary(module: &GoModule, name: &str, package: &str, binary: &Path) -> Result<()> {
    let sources = module.folder();
    let file = sources.join("go.mod");
    let requirements = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
    let part = part_of(binary)?;
    println!("==> building {name} of tests/{} (minutes the first time)", module.name);
    let mut command = Command::new(toolchain(&requirements)?);
    command.current_dir(&sources).env("GOTOOLCHAIN", "local");
    command.env("CGO_ENABLED", if module.cgo { "1" } else { "0" });
    command.env_remove("GOFLAGS").env_remove("GOROOT");
    if module.system == System::Windows {
        command.env("GOOS", "windows").env("GOARCH", "amd64");
    }
    let is_test = name.trim_end_matches(".exe").ends_with(".test");
    command.args(if is_test { ["test", "-c"].as_slice() } else { &["build"] });
    command.args(["-mod=readonly", "-trimpath", "-buildvcs=false", "-tags", module.tags, "-ldflags"]);
    command.arg(linker_flags(&requirements)).arg("-o").arg(&part).arg(package);
    retrying(&mut command)?;
    // The final name appears only when the binary is complete.
    fs::rename(&part, binary).with_context(|| format!("renaming {}", part.display()))
}

/// Runs a command that downloads modules, once more if it fails: registries do so once in a while, and what has arrived stays.
fn retrying(command: &mut Command) -> Result<()> {
    let Err(error) = crate::run(command) else { return Ok(()) };
    println!("==> {error:#}; trying once more");
    std::thread::sleep(Duration::from_secs(10));
    crate::run(command)
}

/// Removes what Go keeps of compiled packages. Binaries and downloaded modules stay.
pub fn clean_cache() -> Result<()> {
    let Some(go) = installed() else { return Ok(()) };
    ask(&go, &["clean", "-cache"]).map(drop)
}

const KUBERNETES: &str = "k8s.io/kubernetes";

/// Go in the folder of a module, for programs for Windows.
pub fn for_windows(module: &Path) -> Result<Command> {
    let requirements = fs::read_to_string(module.join("go.mod"))?;
    let mut command = Command::new(toolchain(&requirements)?);
    command.current_dir(module).env("GOTOOLCHAIN", "local").env("GOOS", "windows").env("GOARCH", "amd64");
    command.env("CGO_ENABLED", "0").env_remove("GOFLAGS").env_remove("GOROOT");
    Ok(command)
}

/// The folder of a module that the module requires.
pub fn module_folder(module: &GoModule, required: &str) -> Result<PathBuf> {
    let requirements = fs::read_to_string(module.folder().join("go.mod"))?;
    let mut command = Command::new(toolchain(&requirements)?);
    command.current_dir(module.folder()).env("GOTOOLCHAIN", "local").env_remove("GOFLAGS");
    command.args(["list", "-mod=readonly", "-m", "-f", "{{.Dir}}", required]);
    Ok(PathBuf::from(output(command)?))
}

/// Binaries without symbols. Those of Kubernetes know their version, as those of a release do.
fn linker_flags(module: &str) -> String {
    let Ok(version) = requirement(module, KUBERNETES) else { return "-s -w".to_owned() };
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let set = |name: &str, value: &str| format!(" -X k8s.io/component-base/version.{name}={value}");
    ["-s -w".to_owned(), set("gitVersion", version), set("gitMajor", major), set("gitMinor", minor)].concat()
}

/// The version of a requirement in go.mod, or of `go` itself.
fn requirement<'a>(module: &'a str, name: &str) -> Result<&'a str> {
    let line = |line: &'a str| {
        let line = line.trim().trim_start_matches("require ");
        line.strip_prefix(name)?.strip_prefix(' ').filter(|version| !version.contains(' '))
    };
    module.lines().find_map(line).with_context(|| format!("go.mod names no version of {name}"))
}

/// Removes other versions of a binary whose files meet the condition.
fn remove_others(binary: &Path, is_unwanted: impl Fn(&Path) -> bool) -> Result<()> {
    let (folder, name) = (binary.parent().context("no folder")?, binary.file_name().context("no name")?);
    let versions = folder.parent().context("the folder has no parent")?;
    for entry in fs::read_dir(versions)?.flatten() {
        let other = entry.path().join(name);
        if other.is_file() && entry.path() != folder && is_unwanted(&other) {
            fs::remove_dir_all(entry.path()).with_context(|| format!("removing {:?}", entry.path()))?;
        }
    }
    Ok(())
}

/// True if no clone has used a cached binary for a month.
fn is_unused(binary: &Path) -> bool {
    let age = fs::metadata(binary).and_then(|file| file.modified()).map(|used| used.elapsed());
    matches!(age, Ok(Ok(age)) if age > Duration::from_secs(30 * 24 * 3600))
}

/// Finds or installs a Go that the module accepts.
pub fn toolchain(module: &str) -> Result<PathBuf> {
    if installed().is_none() {
        packages::install(&packages::GO_PACKAGES)?;
    }
    let go =
        installed().context("Go is missing; install it from https://go.dev/dl, or as Debian's golang-go")?;
    let (present, wanted) = (ask(&go, &["env", "GOVERSION"])?, requirement(module, "go")?);
    if numbers(&present) >= numbers(wanted) {
        return Ok(go);
    }
    println!("==> downloading Go {wanted}, as {} is {present}", go.display());
    let platform = ask(&go, &["env", "GOOS", "GOARCH"])?.replace('\n', "-");
    let name = format!("golang.org/toolchain@v0.0.1-go{wanted}.{platform}");
    let answer = ask(&go, &["mod", "download", "-json", &name])?;
    let answer: serde_json::Value = serde_json::from_str(&answer).with_context(|| answer.clone())?;
    let folder = Path::new(answer["Dir"].as_str().context("`go mod download` names no folder")?);
    // Modules have no executable files.
    for programs in [folder.join("bin"), folder.join(format!("pkg/tool/{}", platform.replace('-', "_")))] {
        for entry in fs::read_dir(&programs).with_context(|| programs.display().to_string())?.flatten() {
            fs::set_permissions(entry.path(), fs::Permissions::from_mode(0o755))?;
        }
    }
    Ok(folder.join("bin/go"))
}

/// The installed Go, of any version.
pub fn installed() -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(FOLDERS.map(PathBuf::from));
    folders.map(|folder| folder.join("go")).find(|go| go.is_file())
}

/// Runs a command of Go outside of any module, and returns its output.
fn ask(go: &Path, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(go);
    command.args(arguments).current_dir("/").env("GOTOOLCHAIN", "local").env_remove("GOFLAGS");
    output(command)
}

fn output(mut command: Command) -> Result<String> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// `go1.26.8` and `1.26.8` as numbers that compare. A pre-release (`1.26rc1`) counts as the version before.
fn numbers(version: &str) -> Vec<u32> {
    let version = version.trim_start_matches("go").split([' ', '-']).next().unwrap_or_default();
    let mut numbers: Vec<u32> = version.split('.').map_while(|part| part.parse().ok()).collect();
    numbers.resize(3, 0);
    numbers
}

#[cfg(test)]
mod tests {
    use test_programs::E2E;

    use super::*;

    #[test]
    fn versions_compare_by_number() {
        for (older, newer) in [
            ("go1.19.8", "1.26.0"),
            ("go1.9", "1.26.0"),
            ("go1.26rc1", "1.26.0"),
            ("1.26.0", "go1.26.8 X:abc"),
        ] {
            assert!(numbers(older) < numbers(newer), "{older} {newer}");
        }
        assert_eq!(numbers("go1.26"), numbers("1.26.0"));
    }

    #[test]
    fn the_modules_name_the_versions() {
        let mut versions = Vec::new();
        for module in [KUBE, E2E] {
            let module = fs::read_to_string(module.folder().join("go.mod")).unwrap();
            let version = requirement(&module, KUBERNETES).unwrap().to_owned();
            assert!(version.starts_with("v1."), "{version}");
            assert!(numbers(requirement(&module, "go").unwrap()) >= numbers("1.20"));
            assert!(linker_flags(&module).contains(&format!("gitVersion={version} ")));
            assert!(requirement(&module, "k8s.io/nothing").is_err());
            // All staging modules have the version that belongs to it.
            let staging = version.replacen("v1.", "v0.", 1);
            for line in module.lines().filter(|line| line.contains("=> k8s.io/")) {
                assert!(line.ends_with(&staging), "{line}");
            }
            versions.push(version);
        }
        assert_eq!(versions[0], versions[1], "nodes and API have different versions");
    }
}
