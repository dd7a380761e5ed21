//! The arguments.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};

use crate::ATTACKS;
use crate::attack::Attack;

/// What the user wants.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) attacks: Vec<&'static Attack>,
    /// How long each attack goes on after its first round.
    pub(crate) time: Duration,
    pub(crate) seed: u64,
}

impl Options {
    /// Reads the arguments.
    pub(crate) fn parse(words: &[&str]) -> Result<Self> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let mut options =
            Self { attacks: Vec::new(), time: Duration::ZERO, seed: u64::from(now.subsec_micros()) };
        let mut words = words.iter();
        while let Some(word) = words.next() {
            let mut number = || -> Result<u64> {
                let value = words.next().with_context(|| format!("{word} needs a value"))?;
                value.parse().with_context(|| format!("{word} {value}: that is no number"))
            };
            match *word {
                "--minutes" => options.time = Duration::from_secs(number()? * 60),
                "--seed" => options.seed = number()?,
                name => match ATTACKS.iter().find(|attack| attack.name == name) {
                    Some(attack) => options.attacks.push(attack),
                    None => bail!("there is no attack {name}; there are {}", names(&ATTACKS)),
                },
            }
        }
        if options.attacks.is_empty() {
            options.attacks.extend(ATTACKS);
        }
        Ok(options)
    }

    /// The arguments that repeat an attack.
    pub(crate) fn repeat(&self, attack: &Attack) -> String {
        let minutes = self.time.as_secs() / 60;
        format!("cargo xtask soak attack {} --minutes {minutes} --seed {}", attack.name, self.seed)
    }
}

fn names(attacks: &[&Attack]) -> String {
    attacks.iter().map(|attack| attack.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn options_name_attacks_time_and_seed() {
        let options = Options::parse(&["bgp", "--minutes", "3", "--seed", "7", "roles"]).unwrap();
        let chosen: Vec<&str> = options.attacks.iter().map(|attack| attack.name).collect();
        assert_eq!((chosen, options.time, options.seed), (vec!["bgp", "roles"], Duration::from_secs(180), 7));
        assert_eq!(options.repeat(options.attacks[0]), "cargo xtask soak attack bgp --minutes 3 --seed 7");
        let all: BTreeSet<&str> = ATTACKS.iter().map(|attack| attack.name).collect();
        assert_eq!(Options::parse(&[]).unwrap().attacks.len(), all.len(), "each has a name of its own");
        for (words, problem) in [
            (&["none"][..], "there is no attack none; there are spoofing, "),
            (&["--seed"], "--seed needs a value"),
            (&["--minutes", "x"], "that is no number"),
        ] {
            let error = Options::parse(words).unwrap_err();
            assert!(error.to_string().contains(problem), "{error}");
        }
    }
}
