//! Random cases: as many as necessary for a proof.
//!
//! Each case has a seed of its own, which a failure prints. `PROPTEST_RNG_SEED` chooses the seed of the first case, and all others follow
//! from it. Cases that have failed once are kept in `testkit/corpus.txt`, and come first.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestError, TestRunner};

use crate::repeat;

/// The maximum number of rounds of cases.
const ROUNDS: usize = 10;

/// Cases that have failed once: the name of a test as its thread has it, and the seed.
const CORPUS: &str = include_str!("../corpus.txt");

thread_local! {
    /// The number of runs of this thread's test. Each run of a test has other cases, and with `PROPTEST_RNG_SEED` the same ones
    /// each time.
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

    /// Runs a test on random cases, and in the first run on those of the corpus before.
    ///
    /// # Errors
    /// The failure on a case.
    pub fn run<S: Strategy>(
        self,
        strategy: &S,
        test: impl Fn(S::Value) -> Result<(), TestCaseError>,
    ) -> Result<(), String> {
        let run = RUNS.replace(RUNS.get() + 1);
        let thread = std::thread::current();
        let name = thread.name().unwrap_or_default();
        if run == 0 {
            in_corpus(CORPUS, name).try_for_each(|seed| self.case(seed, name, strategy, &test))?;
        }
        let first = repeat::seed().wrapping_add(run);
        (0..self.cases).try_for_each(|number| self.case(seed_of(first, number), name, strategy, &test))
    }

    /// Runs the case of a seed.
    #[expect(clippy::print_stdout, reason = "for whoever reads why a test failed")]
    fn case<S: Strategy>(
        self,
        seed: u64,
        name: &str,
        strategy: &S,
        test: &impl Fn(S::Value) -> Result<(), TestCaseError>,
    ) -> Result<(), String> {
        let config = Config {
            cases: 1,
            // `PROPTEST_MAX_SHRINK_ITERS` may set less.
            max_shrink_iters: self.shrinks.min(Config::default().max_shrink_iters),
            failure_persistence: None,
            rng_seed: RngSeed::Fixed(seed),
            ..Config::default()
        };
        TestRunner::new(config).run(strategy, test).map_err(|error| {
            println!("to repeat this case alone: {}", repeat::command(seed, Some("1")));
            println!("to repeat it after all cases before it, whose state it may need: {}", repeated());
            println!("to keep it, once it is understood: the line \"{name} {seed}\" in testkit/corpus.txt");
            match error {
                // The reason describes the case better than its input does, except for a panic.
                TestError::Fail(reason, input) => {
                    println!("the smallest input that fails: {input:?}");
                    reason.to_string()
                }
                other => other.to_string(),
            }
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

/// The first state of a test's own generator of numbers, which is never zero: that of `PROPTEST_RNG_SEED`, otherwise a random one. Prints
/// the command that repeats the test.
#[expect(clippy::print_stdout, reason = "for whoever reads why a test failed")]
pub fn first_number() -> u64 {
    println!("{}", repeated());
    // Neighbouring seeds give numbers that have nothing in common.
    seed_of(repeat::seed(), 1) | 1
}

/// The command that repeats this thread's test with all of its cases.
fn repeated() -> String {
    repeat::command(repeat::seed(), std::env::var("PROPTEST_CASES").ok().as_deref())
}

/// The seed of a case. That of the first is the seed of all, so that a case is repeated by its own seed.
fn seed_of(first: u64, number: u32) -> u64 {
    if number == 0 {
        return first;
    }
    // SplitMix64: neighbours have seeds that have nothing in common.
    let mut mixed = first.wrapping_add(u64::from(number).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// The seeds of a test in the corpus.
fn in_corpus<'a>(corpus: &'a str, name: &'a str) -> impl Iterator<Item = u64> + 'a {
    let lines = corpus.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| line.split_once(' '));
    pairs.filter(move |(test, _)| *test == name).filter_map(|(_, seed)| seed.trim().parse().ok())
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
    let failure = |what| format!("{ROUNDS} rounds prove little: {what}\nto repeat them: {}", repeated());
    lacking().map_or(Ok(()), |what| Err(failure(what)))
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::any;

    use super::*;

    /// The values of a run that fails at this value, and the seed in its last case.
    fn values(random: Random, seed: u64) -> Vec<u64> {
        let seen = RefCell::new(Vec::new());
        let test = |value| {
            seen.borrow_mut().push(value);
            Ok(())
        };
        (0..random.cases)
            .try_for_each(|number| random.case(seed_of(seed, number), "t", &any::<u64>(), &test))
            .unwrap();
        seen.into_inner()
    }

    #[test]
    fn a_case_is_repeated_by_its_seed_alone() {
        let many = Random { cases: 20, shrinks: 0 };
        let one = Random { cases: 1, shrinks: 0 };
        let all = values(many, 7);
        assert_eq!(all, values(many, 7));
        for (number, value) in (0..).zip(&all) {
            assert_eq!(values(one, seed_of(7, number)), [*value]);
        }
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_ne!(values(many, 8), all);
    }

    #[test]
    fn a_failure_on_a_case_is_the_failure_of_the_run() {
        let random = Random { cases: 50, shrinks: 100 };
        let test = |value: u8| {
            if value > 9 { Err(TestCaseError::fail(format!("{value} is large"))) } else { Ok(()) }
        };
        assert_eq!(random.run(&any::<u8>(), test).unwrap_err(), "10 is large");
    }

    #[test]
    fn the_corpus_has_seeds_of_tests() {
        let corpus = "# comment\na::b 1\na::c 2\na::b 18446744073709551615\na::b x\n";
        assert_eq!(in_corpus(corpus, "a::b").collect::<Vec<_>>(), [1, u64::MAX]);
        assert_eq!(in_corpus(corpus, "a").count(), 0);
        let is_line = |line: &str| line.split_once(' ').is_some_and(|(_, seed)| seed.parse::<u64>().is_ok());
        assert!(CORPUS.lines().all(|line| line.starts_with('#') || is_line(line)), "{CORPUS}");
    }

    #[test]
    fn rounds_end_when_nothing_is_lacking() {
        let number = Cell::new(0);
        let round = || {
            number.set(number.get() + 1);
            Ok(())
        };
        rounds(round, || (number.get() < 3).then(|| "more".to_owned())).unwrap();
        assert_eq!(number.get(), 3);
        assert!(rounds(round, || Some("all".to_owned())).unwrap_err().contains("all"));
    }
}
