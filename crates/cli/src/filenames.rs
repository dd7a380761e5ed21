//! The manifests of a command: files, folders of them, or standard input.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::kustomize;

/// The files that a command reads.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Filenames {
    /// Manifests: files, folders of them, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Read the folders in the folders, too
    #[arg(short = 'R', long, requires = "files")]
    recursive: bool,
    /// Manifests without objects are no error
    #[arg(long, requires = "files")]
    pub(crate) skip_empty: bool,
    /// A folder with a kustomization, which `kubectl kustomize` or `kustomize build` builds
    #[arg(short = 'k', long, value_name = "DIR", conflicts_with = "files")]
    kustomize: Option<PathBuf>,
}

/// The text of a manifest, or why it cannot be read.
pub(crate) struct Manifest {
    pub(crate) name: String,
    pub(crate) text: anyhow::Result<String>,
}

impl Filenames {
    /// These files and folders.
    pub(crate) fn new(files: &[PathBuf]) -> Self {
        Self { files: files.to_vec(), ..Self::default() }
    }

    /// Whether none is given.
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty() && self.kustomize.is_none()
    }

    /// The manifests, each with the name that messages use: a file, or the kustomization.
    pub(crate) fn manifests(&self) -> anyhow::Result<Vec<Manifest>> {
        if let Some(folder) = &self.kustomize {
            let text = kustomize::build(folder)?;
            return Ok(vec![Manifest { name: format!("{} (built)", folder.display()), text: Ok(text) }]);
        }
        let files = self.files()?.into_iter();
        Ok(files.map(|file| Manifest { name: file.display().to_string(), text: read(&file) }).collect())
    }

    /// The named files, and the files in named folders with the extension of a manifest.
    fn files(&self) -> anyhow::Result<Vec<PathBuf>> {
        let mut all = Vec::new();
        for path in &self.files {
            if !path.is_dir() {
                all.push(path.clone());
                continue;
            }
            let before = all.len();
            self.add_folder(path, &mut all)?;
            if all.len() == before && !self.skip_empty {
                let hint = if self.recursive { "" } else { ", and folders in it are read only with -R" };
                bail!(
                    "{}: the folder has no manifests: no file in it ends with .yaml, .yml or .json{hint}",
                    path.display()
                );
            }
        }
        Ok(all)
    }

    /// Adds the manifests of a folder, by name. Links to folders are not followed, because they may lead back.
    fn add_folder(&self, folder: &Path, all: &mut Vec<PathBuf>) -> anyhow::Result<()> {
        let shown = || folder.display().to_string();
        let entries = std::fs::read_dir(folder).with_context(shown)?;
        let mut entries = entries.collect::<Result<Vec<_>, _>>().with_context(shown)?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let path = entry.path();
            if entry.file_type().with_context(|| path.display().to_string())?.is_dir() {
                if self.recursive {
                    self.add_folder(&path, all)?;
                }
            } else if is_manifest(&path) && !is_special(&path) {
                all.push(path);
            }
        }
        Ok(())
    }
}

/// The text of a file, or of standard input.
pub(crate) fn read(file: &Path) -> anyhow::Result<String> {
    if file == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("standard input")?;
        return Ok(text);
    }
    std::fs::read_to_string(file).with_context(|| file.display().to_string())
}

/// A pipe or device in a folder could wait for ever. A link to nothing is an error when it is read.
fn is_special(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|metadata| !metadata.is_file())
}

fn is_manifest(file: &Path) -> bool {
    file.extension().is_some_and(|ending| ending == "yaml" || ending == "yml" || ending == "json")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn folders_are_read_as_deeply_as_asked() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("a/b")).unwrap();
        for name in ["z.yaml", "a/c.json", "a/b/d.yml", "a/notes.txt"] {
            std::fs::write(at(name), "").unwrap();
        }
        symlink(folder.path(), at("a/loop")).unwrap();
        let names = |recursive: bool, files: &[&str]| {
            let files = files.iter().map(|name| at(name)).collect();
            let names = Filenames { files, recursive, ..Filenames::default() }.files()?;
            let names =
                names.iter().map(|file| file.strip_prefix(folder.path()).unwrap().display().to_string());
            anyhow::Ok(names.collect::<Vec<_>>())
        };
        assert_eq!(names(false, &[""]).unwrap(), ["z.yaml"]);
        assert_eq!(names(true, &[""]).unwrap(), ["a/b/d.yml", "a/c.json", "z.yaml"]);
        assert_eq!(names(false, &["a/notes.txt", "a"]).unwrap(), ["a/notes.txt", "a/c.json"]);
        std::fs::remove_file(at("a/c.json")).unwrap();
        assert!(names(false, &["a"]).unwrap_err().to_string().contains("only with -R"));
        assert_eq!(names(true, &["a"]).unwrap(), ["a/b/d.yml"]);
        assert!(!Filenames { kustomize: Some("x".into()), ..Filenames::default() }.is_empty());
    }
}
