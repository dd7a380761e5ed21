//! Random cases: as many as necessary for a proof.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};

/// The maximum number of rounds of cases.
const ROUNDS: usize = 10;

thread_local! {
    /// The number of runs of this thread's test. With `PROPTEST_RNG_SEED`, each run of a test has other cases, and the same
    /// ones each time.
    static RUNS: Cell<u64> = const { Cell::new(0) };
}

/// The number of random cases of a test.
#[derive(Debug, Clone, Copy)]
pub struct Random {
    cases: u32,
    shrinks: u32,
}

impl Random {
    /// `PROPTEST_CASES` if set, otherwise the usual number.
    #[must_use]
    pub fn cases(usual: u32) -> Self {
        let configured = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
        Self { cases: configured.unwrap_or(usual), shrinks: 0 }
    }

    /// The maximum number of steps for shrinking a failing case.
    #[must_use]
    pub fn shrinking(self, shrinks: u32) -> Self {
        Self { shrinks, ..self }
    }

    /// Multiplies the number of cases.
    #[must_use]
    pub fn times(self, factor: u32) -> Self {
        Self { cases: self.cases * factor, ..self }
    }

    /// The number of cases.
    #[must_use]
    pub fn count(self) -> usize {
        self.cases as usize
    }

    /// Runs a test on random cases.
    ///
    /// # Errors
    /// The failure on a case.
    #[expect(clippy::print_stdout, reason = "for whoever reads why a test failed")]
    pub fn run<S: Strategy>(
        self,
        strategy: &S,
        test: impl Fn(S::Value) -> Result<(), TestCaseError>,
    ) -> Result<(), String> {
        let mut config = Config {
            cases: self.cases,
            // `PROPTEST_MAX_SHRINK_ITERS` may set less.
            max_shrink_iters: self.shrinks.min(Config::default().max_shrink_iters),
            failure_persistence: None,
            ..Config::default()
        };
        if let RngSeed::Fixed(seed) = &mut config.rng_seed {
            *seed = seed.wrapping_add(RUNS.replace(RUNS.get() + 1));
        }
        TestRunner::new(config).run(strategy, test).map_err(|error| match error {
            // The reason describes the case better than its input does, except for a panic.
            TestError::Fail(reason, input) => {
                println!("the smallest input that fails: {input:?}");
                reason.to_string()
            }
            other => other.to_string(),
        })
    }

    /// Runs a test on random cases, and on more of them while coverage is missing.
    ///
    /// # Errors
    /// The failure on a case, or the missing coverage in the end.
    pub fn prove<S: Strategy>(
        self,
        strategy: &S,
        test: impl Fn(S::Value) -> Result<(), TestCaseError>,
        lacking: impl Fn() -> Option<String>,
    ) -> Result<(), String> {
        rounds(|| self.run(strategy, &test), lacking)
    }
}

/// Runs another round while coverage is missing. A rare case may be absent from one round by chance. If it is absent
/// from [`ROUNDS`] rounds, the generator no longer produces it, and the test proves nothing about it.
///
/// # Errors
/// The failure of a round, or the missing coverage in the end.
pub fn rounds(
    mut round: impl FnMut() -> Result<(), String>,
    lacking: impl Fn() -> Option<String>,
) -> Result<(), String> {
    for _ in 0..ROUNDS {
        round()?;
        if lacking().is_none() {
            return Ok(());
        }
    }
    lacking().map_or(Ok(()), |what| Err(format!("{ROUNDS} rounds prove little: {what}")))
}

/// How many cases of each kind there were, and how many passed.
#[derive(Debug, Default)]
pub struct Tally(BTreeMap<String, (usize, usize)>);

impl Tally {
    /// Counts a case of this kind.
    pub fn count(&mut self, kind: impl Into<String>, passed: bool) {
        let (total, through) = self.0.entry(kind.into()).or_default();
        *total += 1;
        *through += usize::from(passed);
    }

    /// How many cases of a kind there were, and how many passed.
    #[must_use]
    pub fn of(&self, kind: &str) -> (usize, usize) {
        self.0.get(kind).copied().unwrap_or_default()
    }

    /// A kind with fewer passing or fewer failing cases than this.
    #[must_use]
    pub fn lacking(&self, kinds: impl IntoIterator<Item = String>, fewest: usize) -> Option<String> {
        kinds.into_iter().find_map(|kind| {
            let (total, passed) = self.of(&kind);
            let both = passed >= fewest && total - passed >= fewest;
            (!both)
                .then(|| format!("{kind}: {total} were tested, {passed} passed; both ways {fewest} at least"))
        })
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:26} {:>8} {:>8}", "kind", "asked", "passed")?;
        self.0.iter().try_for_each(|(kind, (total, passed))| writeln!(f, "{kind:26} {total:>8} {passed:>8}"))
    }
}
