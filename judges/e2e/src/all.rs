//! Everything that runs on clusters with real nodes, one after the other, and a summary.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use super::{
    ClusterKind, EARLIER, Folder, coexist, connectivity, disruptions, down, lifecycle, migration,
    not_applicable, suites, up,
};

/// What became of a part: what it counted, or its error.
struct Outcome {
    part: &'static str,
    took: Duration,
    result: Result<String, String>,
}

/// The outcomes so far.
#[derive(Default)]
struct Outcomes(Vec<Outcome>);

/// Runs everything. A part that fails does not end the run, and is an error at its end.
pub(super) fn run() -> Result<()> {
    if Folder::new().process().is_some() {
        bail!("a cluster is running; remove it first: cargo xtask e2e down");
    }
    let mut outcomes = Outcomes::default();
    on_cluster(&mut outcomes, "the cluster", ClusterKind::Usual, on_one_family);
    on_cluster(&mut outcomes, "the cluster of both families", ClusterKind::DualStack, on_both_families);
    outcomes.run("install, upgrade, uninstall (lifecycle)", || lifecycle::run().map(|()| String::new()));
    outcomes.run("upgrade under traffic", || lifecycle::upgrade(EARLIER).map(|()| String::new()));
    let (summary, is_good) = summary(&outcomes.0);
    println!("{summary}");
    if is_good { Ok(()) } else { bail!("not everything is as it should be") }
}

fn on_one_family(outcomes: &mut Outcomes, folder: &Folder) {
    outcomes.run("NetworkPolicy", || network(folder, &["-ginkgo.focus=Netpol"]));
    outcomes.run("ClusterNetworkPolicy", || suites::cluster_policy(folder, &[])?.demand_success());
    outcomes.run("other network specs", || {
        let skip = format!("-ginkgo.skip={}", not_applicable::TOO_LARGE);
        network(folder, &[r"-ginkgo.focus=\[sig-network\]", "-ginkgo.skip=Netpol|IPv6DualStack", &skip])
    });
    outcomes.run("host ports", || network(folder, &["-ginkgo.focus=pods with same hostPort"]));
    outcomes.run("tortie connectivity test", || connectivity::run().map(|()| String::new()));
    outcomes.run("disruptions", || disruptions::run().map(|()| String::new()));
    outcomes.run("other programs (coexist)", || coexist::run(folder).map(|()| String::new()));
    outcomes.run("another pool (migrate)", || migration::run().map(|()| String::new()));
}

fn on_both_families(outcomes: &mut Outcomes, folder: &Folder) {
    outcomes.run("both families", || network(folder, &["-ginkgo.focus=IPv6DualStack"]));
}

fn network(folder: &Folder, arguments: &[&str]) -> Result<String> {
    let ran = suites::network(folder, arguments);
    let counts = suites::counts_of_network()?;
    ran.and_then(|()| counts.demand_success()).map_err(|error| error.context(format!("{counts:?}")))
}

/// Starts a cluster, uses it, and removes it.
fn on_cluster(
    outcomes: &mut Outcomes,
    name: &'static str,
    kind: ClusterKind,
    work: fn(&mut Outcomes, &Folder),
) {
    if outcomes.run(name, || up(true, kind).map(|()| String::new())) {
        work(outcomes, &Folder::new());
        outcomes.run("its removal", || down().map(|()| String::new()));
    }
}

impl Outcomes {
    /// Runs a part, and says whether it was well.
    fn run(&mut self, part: &'static str, work: impl FnOnce() -> Result<String>) -> bool {
        println!("==> {part}");
        let started = Instant::now();
        let result = work().map_err(|error| format!("{error:#}"));
        if let Err(error) = &result {
            eprintln!("error: {part}: {error}");
        }
        let is_good = result.is_ok();
        self.0.push(Outcome { part, took: started.elapsed(), result });
        is_good
    }
}

/// A line for each part, and whether all are well.
fn summary(outcomes: &[Outcome]) -> (String, bool) {
    let mut lines = Vec::new();
    for Outcome { part, took, result } in outcomes {
        let (word, details) = match result {
            Ok(details) => ("well", details),
            Err(error) => ("FAILED", error),
        };
        let details = details.lines().next().unwrap_or_default();
        let took = took.as_secs();
        lines.push(format!("{word:<6} {took:>5} s  {part}  {details}").trim_end().to_owned());
    }
    let failed = outcomes.iter().filter(|outcome| outcome.result.is_err()).count();
    lines.push(format!("{} parts, {failed} failed", outcomes.len()));
    (lines.join("\n"), failed == 0 && !outcomes.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_summary_has_each_part_and_its_counts() {
        let mut outcomes = Outcomes::default();
        assert!(outcomes.run("a", || Ok("47 passed".to_owned())));
        assert_eq!(
            summary(&outcomes.0),
            ("well       0 s  a  47 passed\n1 parts, 0 failed".to_owned(), true)
        );
        assert!(!outcomes.run("b", || bail!("two lines\nof an error")));
        let (text, is_good) = summary(&outcomes.0);
        assert!(text.contains("FAILED     0 s  b  two lines\n2 parts, 1 failed"), "{text}");
        assert!(!is_good);
        assert!(!summary(&[]).1, "nothing ran");
    }
}
