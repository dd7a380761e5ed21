//! Random cases: as many as it takes to prove something.

use std::collections::BTreeMap;
use std::fmt;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

/// How many rounds of cases there are at most.
const ROUNDS: usize = 10;

/// How many random cases a test takes.
#[derive(Debug, Clone, Copy)]
pub struct Random {
    cases: u32,
    shrinks: u32,
}

impl Random {
    /// As many as `PROPTEST_CASES` says; without it the usual number.
    #[must_use]
    pub fn cases(usual: u32) -> Self {
        let said = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
        Self { cases: said.unwrap_or(usual), shrinks: 0 }
    }

    /// A case that fails is made smaller in so many steps at most.
    #[must_use]
    pub fn shrinking(self, shrinks: u32) -> Self {
        Self { shrinks, ..self }
    }

    /// So many times as many.
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
    /// Why it fails on a case.
    #[expect(clippy::print_stdout, reason = "for whoever reads why a test failed")]
    pub fn run<S: Strategy>(
        self,
        strategy: &S,
        test: impl Fn(S::Value) -> Result<(), TestCaseError>,
    ) -> Result<(), String> {
        let config = Config {
            cases: self.cases,
            max_shrink_iters: self.shrinks,
            failure_persistence: None,
            ..Config::default()
        };
        TestRunner::new(config).run(strategy, test).map_err(|error| match error {
            // The reason says more of the case than its input does; but not that of a panic.
            TestError::Fail(reason, input) => {
                println!("the smallest input that fails: {input:?}");
                reason.to_string()
            }
            other => other.to_string(),
        })
    }

    /// Runs a test on random cases, and on more of them while something is lacking.
    ///
    /// # Errors
    /// Why it fails on a case, or what is lacking in the end.
    pub fn prove<S: Strategy>(
        self,
        strategy: &S,
        test: impl Fn(S::Value) -> Result<(), TestCaseError>,
        lacking: impl Fn() -> Option<String>,
    ) -> Result<(), String> {
        rounds(|| self.run(strategy, &test), lacking)
    }
}

/// Another round while something is lacking. What is rare may not come up in one, without anything being wrong; what does
/// not come up in [`ROUNDS`] is not made any more, and the test proves nothing of it.
///
/// # Errors
/// What a round fails of, or what is lacking in the end.
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

/// How many of each kind were asked about, and how many passed.
#[derive(Debug, Default)]
pub struct Tally(BTreeMap<String, (usize, usize)>);

impl Tally {
    /// One of this kind, which passed or not.
    pub fn count(&mut self, kind: impl Into<String>, passed: bool) {
        let (asked, through) = self.0.entry(kind.into()).or_default();
        *asked += 1;
        *through += usize::from(passed);
    }

    /// How many of a kind were asked about, and how many passed.
    #[must_use]
    pub fn of(&self, kind: &str) -> (usize, usize) {
        self.0.get(kind).copied().unwrap_or_default()
    }

    /// A kind of which fewer passed than these, or fewer did not.
    #[must_use]
    pub fn lacking(&self, kinds: impl IntoIterator<Item = String>, fewest: usize) -> Option<String> {
        kinds.into_iter().find_map(|kind| {
            let (asked, passed) = self.of(&kind);
            let both = passed >= fewest && asked - passed >= fewest;
            (!both).then(|| {
                format!("{kind}: {asked} were asked about, {passed} passed; both ways {fewest} at least")
            })
        })
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:26} {:>8} {:>8}", "kind", "asked", "passed")?;
        self.0.iter().try_for_each(|(kind, (asked, passed))| writeln!(f, "{kind:26} {asked:>8} {passed:>8}"))
    }
}
