//! The network specs of Kubernetes that this cluster cannot run, and why. They are skipped; docs/conformance.md has them as a table.
//! The suite of ClusterNetworkPolicy has none.

use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use tortie_servers::programs::Program;

/// Specs that need something that this cluster does not have.
pub(super) struct NotApplicable {
    /// How many specs have such names.
    specs: usize,
    /// Regular expressions on the names of specs.
    patterns: &'static [&'static str],
    /// What is missing.
    missing: &'static str,
}

/// All of them. `cargo xtask e2e build` compares their numbers with the suite.
pub(super) const NOT_APPLICABLE: [NotApplicable; 10] = [
    NotApplicable {
        specs: 1,
        patterns: &[r"\[Feature:IPv6DualStack\].*\[Feature:SCTPConnectivity\]"],
        missing: "SCTP over IPv6: the [stand-in for SCTP](#sctp) has IPv4 only",
    },
    NotApplicable {
        specs: 2,
        patterns: &["node-pod communication: sctp", "node-Service: sctp"],
        missing: "the suite skips them itself, until its client on nodes has SCTP (Kubernetes' issue 96482)",
    },
    NotApplicable {
        specs: 17,
        patterns: &[r"\[Feature:LoadBalancer\]"],
        missing: "a cloud with load balancers",
    },
    NotApplicable {
        specs: 17,
        patterns: &[
            "DNS should provide",
            "DNS should resolve",
            "DNS should work with",
            r"DNS should support configurable pod resolv\.conf",
            "DNS HostNetwork should resolve",
            "DNS configMap nameserver",
        ],
        missing: "`dig`, which the image `jessie-dnsutils` has; one also needs the provider GCE. Seven are conformance specs. \"DNS should support \
                  configurable pod DNS nameservers\" runs, and other specs resolve the names of Services",
    },
    NotApplicable {
        specs: 4,
        patterns: &[
            "Proxy version v1 A set of valid responses",
            "Proxy version v1 should proxy through",
            "Services should create endpoints for unready pods",
        ],
        missing: "a route from the API server, which is on no node, to pods. Three are conformance specs",
    },
    NotApplicable {
        specs: 4,
        patterns: &[
            "invalid conntrack state bug",
            "should set TCP CLOSE_WAIT timeout",
            "packets destined for localhost nodeports",
            "should run iperf2",
        ],
        missing: "their images, or `iperf` in agnhost",
    },
    NotApplicable {
        specs: 7,
        patterns: &["Traffic Distribution should", "Topology Hints should distribute endpoints evenly"],
        missing: "three zones",
    },
    NotApplicable {
        specs: 1,
        patterns: &[
            "should implement NodePort and HealthCheckNodePort correctly when ExternalTrafficPolicy changes",
        ],
        missing: "a third node",
    },
    NotApplicable { specs: 3, patterns: &["Internet connection for containers"], missing: "the Internet" },
    NotApplicable { specs: 3, patterns: &[r"\[sig-network\].*\[Disruptive\]"], missing: "SSH to the nodes" },
];

/// The spec that is left out because it creates 10,000 Services.
pub(super) const TOO_LARGE: &str = "Should answer DNS query for maximum number of services per cluster";

/// All patterns.
pub(super) fn patterns() -> impl Iterator<Item = &'static str> {
    NOT_APPLICABLE.iter().flat_map(|specs| specs.patterns).copied()
}

/// Prints what a run of the suite leaves out, and why.
pub(super) fn print() {
    for specs in &NOT_APPLICABLE {
        println!("not applicable: {} specs ({}): {}", specs.specs, specs.patterns.join(", "), specs.missing);
    }
}

/// Compares the numbers of specs with Kubernetes' suite.
///
/// # Errors
/// The suite has another number of specs with such names, or cannot list them.
pub(super) fn check() -> Result<()> {
    for specs in &NOT_APPLICABLE {
        let pattern = specs.patterns.join("|");
        let focus = format!("-ginkgo.focus={pattern}");
        let mut suite = Command::new(Program::Suite.find()?);
        suite.args([
            "-provider=local",
            "-kubeconfig=/dev/null",
            "-ginkgo.dry-run",
            "-ginkgo.no-color",
            &focus,
        ]);
        let output = suite.output().with_context(|| format!("{suite:?}"))?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let found = listed(&text).with_context(|| format!("{suite:?}: {text}"))?;
        ensure!(
            found == specs.specs,
            "the suite has {found} specs {pattern:?}, and NOT_APPLICABLE in judges/e2e/src/not_applicable.rs has {}",
            specs.specs
        );
    }
    Ok(())
}

/// The number of specs that a dry run of the suite selected.
fn listed(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|line| line.strip_prefix("Ran "))?;
    line.split_once(" of ")?.0.parse().ok()
}

/// The table in docs/conformance.md.
#[cfg(test)]
fn table() -> String {
    let mut table = "| specs | names | what is missing |\n|---|---|---|\n".to_owned();
    for NotApplicable { specs, patterns, missing } in &NOT_APPLICABLE {
        let names: Vec<String> = patterns.iter().map(|pattern| format!("`{pattern}`")).collect();
        table.push_str(&format!("| {specs} | {} | {missing} |\n", names.join(", ")));
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOCS: &str = include_str!("../../../docs/conformance.md");

    /// The numbers of a row of the table of suites: specs, passed, failed, not applicable, not run.
    fn row(start: &str) -> [usize; 5] {
        let row = DOCS.lines().find(|line| line.starts_with(start)).unwrap();
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        [1, 2, 3, 4, 5].map(|column| cells[column].parse().unwrap())
    }

    #[test]
    fn the_documentation_has_the_table_and_its_numbers() {
        assert!(DOCS.contains(&table()), "docs/conformance.md lacks this table:\n{}", table());
        let rows = [
            row("| NetworkPolicy:"),
            row("| `[sig-network]` specs of Kubernetes' conformance"),
            row("| the other `[sig-network]` specs"),
            row("| ClusterNetworkPolicy:"),
        ];
        for [specs, passed, failed, not_applicable, not_run] in rows {
            assert_eq!(specs, passed + failed + not_applicable + not_run);
        }
        let all: usize = NOT_APPLICABLE.iter().map(|specs| specs.specs).sum();
        assert_eq!(rows[..3].iter().map(|row| row[3]).sum::<usize>(), all);
        assert_eq!(rows[3][3], 0);
    }

    #[test]
    fn patterns_fit_into_a_table_and_into_one_expression() {
        for pattern in patterns() {
            assert!(!pattern.contains(['|', '`']) && !pattern.is_empty(), "{pattern}");
        }
    }

    #[test]
    fn the_number_of_specs_of_a_dry_run_is_read() {
        assert_eq!(listed("Will run\n\nRan 17 of 942 Specs in 0.029 seconds\nPASS\n"), Some(17));
        assert_eq!(listed("flag provided but not defined"), None);
    }
}
