//! What libFuzzer prints.

use std::collections::BTreeSet;

/// The size of a search.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Summary {
    /// The inputs that were run.
    pub(crate) cases: u64,
    /// The branches that they have reached.
    pub(crate) edges: u64,
}

impl Summary {
    /// Reads the last numbers of the output.
    pub(crate) fn of(text: &str) -> Self {
        let mut summary = Self::default();
        for line in text.lines() {
            let words: Vec<&str> = line.split_whitespace().collect();
            match words.as_slice() {
                // #1024 pulse cov: 17 ft: 20 corp: 3/9b …
                [number, _, "cov:", edges, ..] if number.starts_with('#') => {
                    summary.cases = number[1..].parse().unwrap_or(summary.cases);
                    summary.edges = edges.parse().unwrap_or(summary.edges);
                }
                ["stat::number_of_executed_units:", cases] => {
                    summary.cases = cases.parse().unwrap_or(summary.cases);
                }
                _ => {}
            }
        }
        summary
    }
}

/// The words of an input: what begins with a letter and has at least three characters.
pub(crate) fn words(input: &[u8]) -> BTreeSet<String> {
    let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || b"-./_".contains(byte);
    let words = input.split(|byte| !is_part(byte)).filter(|word| (3..=64).contains(&word.len()));
    words
        .filter_map(|word| String::from_utf8(word.to_vec()).ok())
        .filter(|word| word.starts_with(|c: char| c.is_ascii_alphabetic()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_numbers_count() {
        let text = "INFO: Seed: 7\n#2\tINITED cov: 11 ft: 12 corp: 1/1b exec/s: 0 rss: 40Mb\n\
            #4096\tpulse  cov: 170 ft: 300 corp: 20/90b lim: 6 exec/s: 2048 rss: 41Mb\npanicked at #x\n";
        assert_eq!(Summary::of(text), Summary { cases: 4096, edges: 170 });
        let ended = format!("{text}stat::number_of_executed_units: 5000\n");
        assert_eq!(Summary::of(&ended), Summary { cases: 5000, edges: 170 });
        assert_eq!(Summary::of("sh: not found"), Summary::default());
    }

    #[test]
    fn words_of_inputs_become_a_dictionary() {
        let found = words(b"\x00{\"apiVersion\": \"a.b/v3\", \"x\": 10.0.0.1, \"\\u0000cidr\"}\xff");
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["a.b/v3", "apiVersion", "u0000cidr"]);
    }
}
