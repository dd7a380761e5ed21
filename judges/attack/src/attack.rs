//! An attack: what the attacker has, what must hold, and what came of it.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use rand::SeedableRng as _;
use rand::rngs::StdRng;

/// An attack as a program.
#[derive(Debug)]
pub(crate) struct Attack {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// What the attacker has and does.
    pub(crate) attacker: &'static str,
    /// What must hold meanwhile.
    pub(crate) holds: &'static str,
    /// Carries it out: one round at least, and more until the time of [`Bounds`] is over.
    pub(crate) run: fn(&mut Bounds) -> Result<Outcome>,
}

/// The program that is attacked, the random choices, and the time.
#[derive(Debug)]
pub(crate) struct Bounds {
    pub(crate) program: PathBuf,
    pub(crate) random: StdRng,
    end: Instant,
    rounds: u32,
}

impl Bounds {
    pub(crate) fn new(program: PathBuf, seed: u64, time: Duration) -> Self {
        Self { program, random: StdRng::seed_from_u64(seed), end: Instant::now() + time, rounds: 0 }
    }

    /// True for the first round, and for others until the time is over.
    pub(crate) fn another_round(&mut self) -> bool {
        self.rounds += 1;
        self.rounds == 1 || Instant::now() < self.end
    }
}

/// What came of an attack.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// Packets, requests, connections or objects of the attacker that must have no effect.
    pub(crate) attempts: u64,
    /// What got through nevertheless, a text for each.
    pub(crate) through: Vec<String>,
    /// Attempts of the same form that had to succeed, and did.
    pub(crate) controls: u64,
    /// What was measured.
    pub(crate) notes: Vec<String>,
}

impl Outcome {
    /// Something got through.
    pub(crate) fn blame(&mut self, what: impl Into<String>) {
        self.through.push(what.into());
    }

    /// Counts a control. One that fails shows that the attack is none, so that its success means nothing.
    ///
    /// # Errors
    /// The control has failed.
    pub(crate) fn control(&mut self, succeeded: bool, what: &str) -> Result<()> {
        ensure!(succeeded, "the attack proves nothing: {what}");
        self.controls += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_control_that_fails_ends_the_attack() {
        let mut outcome = Outcome::default();
        outcome.control(true, "it arrives").unwrap();
        assert_eq!(outcome.controls, 1);
        let error = outcome.control(false, "it does not arrive").unwrap_err();
        assert_eq!(error.to_string(), "the attack proves nothing: it does not arrive");
    }

    #[test]
    fn there_is_one_round_without_time() {
        let mut bounds = Bounds::new(PathBuf::new(), 1, Duration::ZERO);
        assert!(bounds.another_round() && !bounds.another_round());
        let mut bounds = Bounds::new(PathBuf::new(), 1, Duration::from_secs(60));
        assert!(bounds.another_round() && bounds.another_round());
    }
}
