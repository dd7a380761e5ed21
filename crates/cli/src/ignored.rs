//! Files in folders that a command does not read: those of `--ignore`, and of a file `.tortieignore` in the folder.

use std::path::{Component, Path};

use anyhow::Context;

/// The file of a folder that lists what is not read in it, one path or name per line.
const LIST: &str = ".tortieignore";

/// A path, or a name at any depth. `*` stands for any part of a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pattern {
    names: Vec<String>,
    /// It is one name, wherever it is.
    is_anywhere: bool,
}

impl Pattern {
    pub(crate) fn read(text: &str) -> Self {
        let is_anywhere = !text.trim_end_matches('/').contains('/');
        Self { names: names(Path::new(text)), is_anywhere }
    }

    /// Whether this is the path of a file, or of a folder above it.
    pub(crate) fn matches(&self, path: &Path) -> bool {
        let names = names(path);
        match (self.is_anywhere, self.names.as_slice()) {
            (_, []) => false,
            (true, [own, ..]) => names.iter().any(|name| is_like(name, own)),
            (false, own) => {
                own.len() <= names.len() && own.iter().zip(&names).all(|(own, name)| is_like(name, own))
            }
        }
    }
}

/// The patterns of a folder's own list. Lines that begin with `#` are comments.
pub(crate) fn of_folder(folder: &Path) -> anyhow::Result<Vec<Pattern>> {
    let file = folder.join(LIST);
    let text = match std::fs::read_to_string(&file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => text.with_context(|| file.display().to_string())?,
    };
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(lines.map(Pattern::read).collect())
}

fn names(path: &Path) -> Vec<String> {
    let named = path.components().filter(|part| !matches!(part, Component::CurDir));
    named.map(|part| part.as_os_str().to_string_lossy().into_owned()).collect()
}

fn is_like(name: &str, pattern: &str) -> bool {
    let Some((begin, rest)) = pattern.split_once('*') else { return name == pattern };
    let Some(left) = name.strip_prefix(begin) else { return false };
    let ends = left.char_indices().map(|(index, _)| index).chain([left.len()]);
    ends.filter_map(|index| left.get(index..)).any(|end| is_like(end, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_paths_or_names() {
        for (pattern, path, expected) in [
            ("values.yaml", "values.yaml", true),
            ("values.yaml", "a/b/values.yaml", true),
            ("values.yaml", "a/b/values.yml", false),
            ("values*.yaml", "a/values-prod.yaml", true),
            ("*.tpl.*", "a/x.tpl.yaml", true),
            ("*", "x", true),
            ("templates", "a/templates/x.yaml", true),
            ("templates/", "a/templates/x.yaml", true),
            ("a/templates", "a/templates/x.yaml", true),
            ("./a/templates", "a/templates", true),
            ("a/templates", "./a/templates/x.yaml", true),
            ("a/templates", "b/a/templates/x.yaml", false),
            ("a/*/x.yaml", "a/b/x.yaml", true),
            ("a/*/x.yaml", "a/x.yaml", false),
            ("", "x", false),
        ] {
            assert_eq!(Pattern::read(pattern).matches(Path::new(path)), expected, "{pattern} {path}");
        }
    }
}
