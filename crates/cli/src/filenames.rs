//! The manifests of a command: files, folders of them, or standard input.

use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::ignored::{self, Pattern};
use crate::{kustomize, output};

/// The files that a command reads.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct Filenames {
    /// Manifests: files, folders of them, or - for standard input
    #[arg(short, long = "filename", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Read the folders in the folders, too
    #[arg(short = 'R', long, requires = "files")]
    recursive: bool,
    /// In folders, do not read this file or folder: a path, or a name at any depth, with * for any part of a name. A file
    /// .tortieignore of the folder lists more
    #[arg(long, value_name = "PATH", requires = "files")]
    ignore: Vec<String>,
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

    /// Whether a file is named itself, and not only its folder.
    pub(crate) fn names(&self, file: &str) -> bool {
        self.files.iter().any(|path| path.display().to_string() == file)
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
        let ignored: Vec<Pattern> = self.ignore.iter().map(|text| Pattern::read(text)).collect();
        let (mut all, mut left_out) = (Vec::new(), 0);
        for path in &self.files {
            if !path.is_dir() {
                all.push(path.clone());
                continue;
            }
            let before = all.len();
            self.add_folder(path, &mut all)?;
            let of_folder = ignored::of_folder(path)?;
            let found = all.split_off(before);
            let count = found.len();
            all.extend(found.into_iter().filter(|file| {
                let within = file.strip_prefix(path).unwrap_or(file);
                !ignored.iter().any(|pattern| pattern.matches(file))
                    && !of_folder.iter().any(|pattern| pattern.matches(within))
            }));
            left_out += count - (all.len() - before);
            if all.len() == before && !self.skip_empty {
                let hint = if self.recursive { "" } else { ", and folders in it are read only with -R" };
                bail!(
                    "{}: the folder has no manifests: no file in it ends with .yaml, .yml or .json{hint}",
                    path.display()
                );
            }
        }
        if left_out > 0 {
            let files = output::count(left_out as u64, "file");
            output::error_line(&format!("note: left out by --ignore or .tortieignore: {files}"));
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
    let is_input = file == Path::new("-");
    let name = || if is_input { "standard input".to_owned() } else { file.display().to_string() };
    let bytes = if is_input {
        let mut bytes = Vec::new();
        std::io::stdin().read_to_end(&mut bytes).map(|_| bytes)
    } else {
        std::fs::read(file)
    };
    decoded(bytes.with_context(name)?).with_context(name)
}

/// Text in UTF-8, or in UTF-16 with a byte order mark, as editors on Windows write it and kubectl reads it.
fn decoded(bytes: Vec<u8>) -> anyhow::Result<String> {
    let from_utf_16 = |bytes: &[u8], number: fn([u8; 2]) -> u16| {
        let (pairs, rest) = bytes.as_chunks::<2>();
        let numbers: Vec<u16> = pairs.iter().map(|pair| number(*pair)).collect();
        let text = String::from_utf16(&numbers).context("it is not valid UTF-16")?;
        if !rest.is_empty() {
            bail!("it is not valid UTF-16: it has an odd number of bytes");
        }
        Ok(text)
    };
    match bytes.as_slice() {
        [0xff, 0xfe, text @ ..] => from_utf_16(text, u16::from_le_bytes),
        [0xfe, 0xff, text @ ..] => from_utf_16(text, u16::from_be_bytes),
        [0xef, 0xbb, 0xbf, text @ ..] => String::from_utf8(text.to_vec()).context("it is not valid UTF-8"),
        _ => String::from_utf8(bytes).context("it is not valid UTF-8"),
    }
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

    #[test]
    fn folders_are_read_without_what_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(at("a/templates")).unwrap();
        for name in ["a.yaml", "values.yaml", "a/values.yaml", "a/templates/x.yaml", "a/b.yaml"] {
            std::fs::write(at(name), "").unwrap();
        }
        std::fs::write(at(".tortieignore"), "# charts\na/templates\n\nvalues.yaml\n").unwrap();
        let ignore = vec![at("a/b.yaml").display().to_string()];
        let files = vec![folder.path().to_owned(), at("a/b.yaml")];
        let files = Filenames { files, ignore, recursive: true, ..Filenames::default() }.files().unwrap();
        assert_eq!(files, [at("a.yaml"), at("a/b.yaml")]);
    }

    #[test]
    fn text_is_decoded_as_kubectl_decodes_it() {
        let text = "kind: Pod # ü\n";
        let utf_16 = |mark: u16, bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
            std::iter::once(mark).chain(text.encode_utf16()).flat_map(bytes).collect()
        };
        for bytes in [
            text.as_bytes().to_vec(),
            ["\u{feff}", text].concat().into_bytes(),
            utf_16(0xfeff, u16::to_le_bytes),
            utf_16(0xfeff, u16::to_be_bytes),
        ] {
            assert_eq!(decoded(bytes.clone()).unwrap(), text, "{bytes:?}");
        }
        for bytes in [vec![b'a', 0xff], vec![0xff, 0xfe, 0], vec![0xff, 0xfe, 0, 0xd8]] {
            assert!(decoded(bytes.clone()).is_err(), "{bytes:?}");
        }
    }
}
