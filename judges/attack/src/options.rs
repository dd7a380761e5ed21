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
