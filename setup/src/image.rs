//! `cargo xtask image`: the container image as an OCI archive, without a container engine.
//!
//! Cargo builds static programs for each architecture; [`archive`] packs them. The image has no shell and no other files.

mod archive;
mod tar;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::command::cargo_program;
use crate::{packages, run, target_folder, workspace};
use archive::{Archive, Platform};

/// The name under which a container runtime keeps the image, as in the manifests.
pub const NAME: &str = concat!("tortie.io/tortie:", env!("CARGO_PKG_VERSION"));

/// An architecture of nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Architecture {
    /// Its name in OCI documents and for Kubernetes.
    name: &'static str,
    /// Its name for Rust.
    target: &'static str,
    /// The compiler for the few C files of the program (`ring`, `mimalloc`).
    compiler: &'static str,
}

const ARCHITECTURES: [Architecture; 2] = [
    Architecture { name: "amd64", target: "x86_64-unknown-linux-musl", compiler: "musl-gcc" },
    Architecture { name: "arm64", target: "aarch64-unknown-linux-musl", compiler: "aarch64-linux-gnu-gcc" },
];

/// The programs of the image, and their packages.
const PROGRAMS: [(&str, &str); 2] = [("tortie", "tortie-cli"), ("tortie-cni", "tortie-cni")];

/// Options of `cargo xtask image`.
#[derive(Debug, PartialEq, Eq)]
struct Options {
    architectures: Vec<Architecture>,
    /// The profile of cargo.
    profile: &'static str,
    name: String,
    output: PathBuf,
}

/// The profile of images for clusters.
const SHIPPED: &str = "image";
/// The profile of images for tests.
const QUICK: &str = "quick";

/// Builds the image.
pub fn build(arguments: &[&str]) -> Result<()> {
    write(&options(arguments)?, &Source::present()?)
}

/// Builds the image for this machine only and without optimization, and writes it to this file, under this name.
pub fn build_for_this_machine(output: &Path, name: &str) -> Result<()> {
    let (architectures, name, output) = (vec![this_machine()?], name.to_owned(), output.to_owned());
    write(&Options { architectures, profile: QUICK, name, output }, &Source::present()?)
}

/// The same of an earlier commit, whose sources are extracted to this folder. Returns the folder of the programs.
pub fn build_earlier(commit: &str, folder: &Path, output: &Path, name: &str) -> Result<PathBuf> {
    let source = Source { folder: folder.join("source"), target: folder.join("target") };
    let extracted = folder.join("commit");
    if std::fs::read_to_string(&extracted).is_ok_and(|known| known == commit) {
        println!("==> the sources of {commit} are in {}", source.folder.display());
    } else {
        if source.folder.exists() {
            std::fs::remove_dir_all(&source.folder)?;
        }
        std::fs::create_dir_all(&source.folder)?;
        let archive = folder.join("source.tar");
        let mut git = Command::new("git");
        git.args(["archive", "--format=tar", "--output"]).arg(&archive).arg(commit);
        run(git.current_dir(workspace()?))
            .with_context(|| format!("commit {commit}; a shallow clone needs `git fetch --unshallow`"))?;
        run(Command::new("tar")
            .arg("--extract")
            .arg("--file")
            .arg(&archive)
            .arg("--directory")
            .arg(&source.folder))?;
        std::fs::remove_file(&archive)?;
        std::fs::write(&extracted, commit)?;
    }
    let (architecture, name, output) = (this_machine()?, name.to_owned(), output.to_owned());
    write(&Options { architectures: vec![architecture], profile: QUICK, name, output }, &source)?;
    Ok(source.shipped(architecture, QUICK))
}

/// Where the sources are, and where cargo writes.
struct Source {
    folder: PathBuf,
    target: PathBuf,
}

impl Source {
    fn present() -> Result<Self> {
        Ok(Self { folder: workspace()?, target: target_folder()? })
    }

    /// True before the lab had a crate of its own. It was a feature of `tortie-cli` then, and the only program was `tortie`.
    fn has_lab_as_feature(&self) -> bool {
        !self.folder.join("crates/program").exists()
    }

    /// The folder into which cargo builds.
    fn built(&self, architecture: Architecture, profile: &str) -> PathBuf {
        self.target.join(architecture.target).join(profile)
    }

    /// The folder in which the shipped programs have their public names.
    fn shipped(&self, architecture: Architecture, profile: &str) -> PathBuf {
        let built = self.built(architecture, profile);
        if self.has_lab_as_feature() { built } else { built.join("packaged") }
    }
}

fn this_machine() -> Result<Architecture> {
    let mut all = ARCHITECTURES.into_iter();
    let here = all.find(|architecture| architecture.target.starts_with(std::env::consts::ARCH));
    here.with_context(|| format!("no image for {}", std::env::consts::ARCH))
}

fn write(options: &Options, source: &Source) -> Result<()> {
    packages::install(&packages::IMAGE_PACKAGES)?;
    let mut platforms = Vec::new();
    for architecture in &options.architectures {
        platforms.push(platform(*architecture, options.profile, source)?);
    }
    let archive = Archive::new(&options.name, &platforms)?;
    let file = workspace()?.join(&options.output);
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(&file, &archive.bytes).with_context(|| file.display().to_string())?;
    for platform in &platforms {
        for (name, program) in &platform.programs {
            println!("{:>12} {name:<12} {:>6.1} MB", platform.architecture, megabytes(program.len()));
        }
    }
    println!(
        "{}: {} {}, {:.1} MB",
        options.output.display(),
        options.name,
        archive.digest,
        megabytes(archive.bytes.len())
    );
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn megabytes(bytes: usize) -> f64 {
    bytes as f64 / 1e6
}

fn options(arguments: &[&str]) -> Result<Options> {
    let mut options = Options {
        architectures: ARCHITECTURES.to_vec(),
        profile: SHIPPED,
        name: NAME.to_owned(),
        output: PathBuf::from("target/image/tortie.tar"),
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--arch", name] => {
                let known = ARCHITECTURES.into_iter().find(|architecture| architecture.name == *name);
                let known = known.with_context(|| format!("--arch {name}: use amd64 or arm64"))?;
                options.architectures = vec![known];
            }
            ["--name", name] => options.name = (*name).to_owned(),
            ["--output", path] => options.output = PathBuf::from(path),
            _ => bail!("usage: cargo xtask image [--arch amd64|arm64] [--name NAME] [--output FILE]"),
        }
    }
    Ok(options)
}

/// Builds the programs of an architecture without optimization, and returns their folder.
pub fn programs(architecture: &str) -> Result<PathBuf> {
    let known = ARCHITECTURES.into_iter().find(|known| known.name == architecture);
    let known = known.with_context(|| format!("no image for {architecture}"))?;
    compile(known, QUICK, Contents::Shipped, &Source::present()?)
}

/// Builds the programs for this machine as the image has them, and with the lab in which they are measured. Returns their folder.
pub fn programs_with_lab() -> Result<PathBuf> {
    packages::install(&packages::IMAGE_PACKAGES)?;
    compile(this_machine()?, SHIPPED, Contents::WithLab, &Source::present()?)
}

/// Builds and reads the programs of an architecture.
fn platform(architecture: Architecture, profile: &str, source: &Source) -> Result<Platform> {
    let folder = compile(architecture, profile, Contents::Shipped, source)?;
    let mut programs = Vec::new();
    for (program, _) in PROGRAMS {
        let file = folder.join(program);
        let bytes = std::fs::read(&file).with_context(|| file.display().to_string())?;
        programs.push((program.to_owned(), bytes));
    }
    Ok(Platform { architecture: architecture.name.to_owned(), programs })
}

/// What the program `tortie` contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Contents {
    /// What packages contain.
    Shipped,
    /// The lab, too.
    WithLab,
}

/// Builds the programs of an architecture. Returns the folder in which they have the names of the image.
fn compile(
    architecture: Architecture,
    profile: &str,
    contents: Contents,
    source: &Source,
) -> Result<PathBuf> {
    let Architecture { name, target, compiler } = architecture;
    println!("==> {name}");
    packages::target(target)?;
    let variable = target.replace('-', "_");
    let mut cargo = cargo_program();
    cargo.current_dir(&source.folder).env("CARGO_TARGET_DIR", &source.target);
    cargo.args(["build", "--profile", profile, "--target", target]);
    let packages = match contents {
        Contents::Shipped => PROGRAMS.map(|(_, package)| package),
        Contents::WithLab => ["tortie-program", "tortie-cni"],
    };
    cargo.args(packages.iter().flat_map(|package| ["--package", package]));
    if source.has_lab_as_feature() {
        cargo.arg("--no-default-features");
    }
    // Rust brings the linker and the C library of these targets; the compiler is for C files of dependencies.
    cargo.env(format!("CARGO_TARGET_{}_LINKER", variable.to_uppercase()), linker()?);
    cargo.env(format!("CC_{variable}"), compiler);
    // No path of the machine that builds is in the programs.
    cargo.env(format!("CARGO_TARGET_{}_RUSTFLAGS", variable.to_uppercase()), remapped(&source.folder)?);
    run(&mut cargo)?;
    let built = source.built(architecture, profile);
    if contents == Contents::WithLab {
        return Ok(built);
    }
    let shipped = source.shipped(architecture, profile);
    if shipped != built {
        copy_packaged(&built, &shipped)?;
    }
    Ok(shipped)
}

/// Copies the built programs into another folder, under the names that they have in the image.
fn copy_packaged(built: &Path, folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder)?;
    for (file, name) in [("tortie-packaged", "tortie"), ("tortie-cni", "tortie-cni")] {
        std::fs::copy(built.join(file), folder.join(name)).with_context(|| file.to_owned())?;
    }
    Ok(())
}

/// The linker that comes with Rust.
fn linker() -> Result<PathBuf> {
    let ask = |what: &[&str]| -> Result<String> {
        let output = Command::new("rustc").args(what).output().context("rustc")?;
        Ok(String::from_utf8(output.stdout)?)
    };
    let root = ask(&["--print", "sysroot"])?;
    let version = ask(&["-vV"])?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).context("rustc names no host")?;
    Ok(Path::new(root.trim()).join("lib/rustlib").join(host).join("bin/rust-lld"))
}

/// Flags of rustc that replace the folders of this machine.
fn remapped(here: &Path) -> Result<String> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cargo")));
    let home = home.context("neither CARGO_HOME nor HOME is set")?;
    let home = home.display();
    Ok(format!("--remap-path-prefix={home}=/cargo --remap-path-prefix={}=/tortie", here.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_programs_of_any_commit_are_found() {
        let folder = std::env::temp_dir().join("tortie-no-such-folder");
        let earlier = Source { folder, target: "t".into() };
        let amd64 = ARCHITECTURES[0];
        assert_eq!(earlier.shipped(amd64, QUICK), Path::new("t/x86_64-unknown-linux-musl/quick"));
        let present = Source { folder: workspace().unwrap(), ..earlier };
        assert_eq!(present.shipped(amd64, QUICK), Path::new("t/x86_64-unknown-linux-musl/quick/packaged"));
    }

    #[test]
    fn options_are_read_or_rejected() {
        let all = options(&[]).unwrap();
        assert_eq!((all.architectures.len(), all.name.as_str()), (2, NAME));
        let one = options(&["--arch", "arm64", "--name", "n:1", "--output", "f.tar"]).unwrap();
        assert_eq!(
            (one.architectures[0].name, one.name.as_str(), one.architectures.len()),
            ("arm64", "n:1", 1)
        );
        for wrong in [&["--arch", "s390x"][..], &["--arch"], &["meow"]] {
            assert!(options(wrong).is_err(), "{wrong:?}");
        }
    }
}
