//! `cargo xtask windows`: the programs for Windows.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use test_programs::{WINDOWS_LIBRARIES, WINDOWS_PROGRAMS, windows_folder};

use crate::command::{cargo_program, linting};
use crate::{packages, run, step, target_folder};

/// The target. Its programs need no library of Microsoft's compiler.
const TARGET: &str = "x86_64-pc-windows-gnu";

/// The packages of the programs, without the lab.
const PROGRAMS: [&str; 4] = ["--package", "tortie-cli", "--package", "tortie-cni"];
/// The files of the programs, in the order of [`wine::PROGRAMS`].
const FILES: [&str; 2] = ["tortie-packaged.exe", "tortie-cni.exe"];
/// The package of the libraries for Wine.
const LIBRARIES: [&str; 2] = ["--package", "tortie-hns-dll"];

/// The program in the place of PowerShell, of the same package.
pub const POWERSHELL: &str = "powershell.exe";

/// The package of the library that Wine 8 lacks.
const RANDOM_NUMBERS: [&str; 2] = ["--manifest-path", "crates/hns-dll/prng/Cargo.toml"];

/// The folder of what was built: `tortie.exe`, `tortie-cni.exe`, and what programs need under Wine.
pub struct Built {
    /// The libraries beside them.
    pub libraries: Libraries,
}

impl Built {
    /// `tortie.exe`.
    pub fn tortie(&self) -> PathBuf {
        self.libraries.folder.join("tortie.exe")
    }

    /// `tortie-cni.exe`.
    pub fn plugin(&self) -> PathBuf {
        self.libraries.folder.join("tortie-cni.exe")
    }
}

/// The libraries for Wine, all in this folder.
pub struct Libraries {
    /// The folder.
    pub folder: PathBuf,
}

/// Where Rust's library for Windows comes from.
enum Toolchain {
    /// It is installed.
    Installed,
    /// Debian's compiler builds it.
    Debian,
}

impl Toolchain {
    fn find() -> Result<Self> {
        match packages::target(TARGET) {
            Ok(()) => Ok(Self::Installed),
            Err(error) => {
                println!("==> {error:#}; Debian's compiler builds it");
                Self::of_debian()
            }
        }
    }

    fn of_debian() -> Result<Self> {
        packages::install(&packages::WINDOWS_LIBRARY_PACKAGES)?;
        Ok(Self::Debian)
    }

    /// The folder of what is built. Two compilers do not share one.
    fn folder(&self) -> Result<PathBuf> {
        let target = target_folder()?;
        Ok(match self {
            Self::Installed => target,
            Self::Debian => target.join("windows"),
        })
    }

    /// A command that builds these packages, with lints. Debian's compiler is another version, with other lints.
    fn build(&self, packages: &[&str]) -> Result<Command> {
        let mut command = match self {
            Self::Installed => cargo_program(),
            Self::Debian => Command::new("/usr/bin/cargo"),
        };
        command.arg("build");
        match self {
            Self::Installed => drop(command.envs(linting()?)),
            Self::Debian => {
                command.args(["-Z", "build-std=std,panic_abort"]).env("RUSTC_BOOTSTRAP", "1");
                // Cargo's own variables would choose the other compiler.
                command.env("RUSTC", "/usr/bin/rustc").env_remove("RUSTUP_TOOLCHAIN").env_remove("CARGO");
                command.env_remove("RUSTC_WORKSPACE_WRAPPER");
            }
        }
        command.args(["--target", TARGET]).args(packages).arg("--target-dir").arg(self.folder()?);
        Ok(command)
    }
}

/// `cargo xtask windows`.
pub fn run_with(arguments: &[&str]) -> Result<()> {
    match arguments {
        [] => build().map(drop),
        ["--debian"] => build_with(&Toolchain::of_debian()?).map(drop),
        _ => bail!("cargo xtask windows takes --debian or nothing"),
    }
}

/// Builds the libraries for Wine alone, for programs of others.
pub fn libraries() -> Result<Libraries> {
    packages::install(&packages::WINDOWS_PACKAGES)?;
    build_libraries(&Toolchain::find()?)
}

fn build_libraries(toolchain: &Toolchain) -> Result<Libraries> {
    step("the libraries for Wine", || {
        run(&mut toolchain.build(&LIBRARIES)?)?;
        run(&mut toolchain.build(&RANDOM_NUMBERS)?)
    })?;
    // One library serves under two names.
    let files = ["tortie_hns_dll.dll", "tortie_hns_dll.dll", "bcryptprimitives.dll"];
    let libraries = files.into_iter().zip(WINDOWS_LIBRARIES);
    put_together(toolchain, libraries.chain([(POWERSHELL, POWERSHELL)]))
}

/// Puts what was built into one folder, under these names, where `tortie lab --wine` finds it, too.
fn put_together(
    toolchain: &Toolchain,
    files: impl Iterator<Item = (&'static str, &'static str)>,
) -> Result<Libraries> {
    let folder = windows_folder();
    fs::create_dir_all(&folder)?;
    let built = toolchain.folder()?.join(TARGET).join("debug");
    for (file, name) in files {
        let unfinished = folder.join(format!("{name}.new"));
        fs::copy(built.join(file), &unfinished).with_context(|| file.to_owned())?;
        // A program that runs keeps the file that it has.
        fs::rename(unfinished, folder.join(name))?;
    }
    Ok(Libraries { folder })
}

/// Builds and checks everything for Windows.
pub fn build() -> Result<Built> {
    build_with(&Toolchain::find()?)
}

fn build_with(toolchain: &Toolchain) -> Result<Built> {
    packages::install(&packages::WINDOWS_PACKAGES)?;
    step("the programs for Windows", || run(&mut toolchain.build(&PROGRAMS)?))?;
    let libraries = build_libraries(toolchain)?;
    put_together(toolchain, FILES.into_iter().zip(WINDOWS_PROGRAMS))?;
    let built = Built { libraries };
    println!("==> {}\n==> {}", built.tortie().display(), built.plugin().display());
    Ok(built)
}
