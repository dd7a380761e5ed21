//! What `cargo xtask` prints for people.

/// All tasks.
pub(crate) const USAGE: &str = "cargo xtask setup           installs what tests, checks and benchmarks need (Debian packages, Go programs); needs root
cargo xtask test [ARGS]     every test of the workspace; ARGS go to cargo test; needs root
cargo xtask soak            what takes too long for every change: the random tests of policy, dataplanes, addresses, BGP and CNI with up to
                            ten million cases, fuzzing, attacks, a thousand kills under traffic, and an hour of chaos; needs root
cargo xtask soak advisories  libraries with known advisories, and yanked ones; builds cargo-deny
cargo xtask soak attack [NAME…] [--minutes N] [--seed N]  attacks as programs, one round or N minutes of each; needs root
cargo xtask soak chaos [--minutes N] [--seed N] [--nodes N] [--datastore embedded|etcd|kubernetes]
                            random faults in a lab under traffic; without options 60 minutes with 10 nodes (a try: 3 with 4)
cargo xtask soak fuzz [TARGET…] [--seconds N]  libFuzzer on the parsers, a minute each without N; needs a compiler of C++
cargo xtask ci              what must hold before a change lands: formatting, lints, licences, tests
cargo xtask kube build      builds Kubernetes for tests (tests/kube); needs Go, or installs it
cargo xtask kube up|down    starts etcd, API server, controller manager and scheduler on loopback; ends them
cargo xtask e2e build       builds the programs of nodes and Kubernetes' suite (tests/e2e)
cargo xtask e2e up [--dual-stack|--without-kube-proxy|--without-tortie]
                            starts a cluster with two nodes that run pods, and installs Tortie; needs root, as do all that follow
cargo xtask e2e down        removes it
cargo xtask e2e all         all that follows, except for windows and flannel, on clusters of its own, and a summary; about 80 minutes
cargo xtask e2e run [ARGS]  runs Kubernetes' network suite there, without inapplicable specs; ARGS go to it (-ginkgo.focus=Netpol)
cargo xtask e2e policy [ARGS]
                            runs the conformance suite of ClusterNetworkPolicy there (-test.run, -test.skip)
cargo xtask e2e connectivity  runs `tortie connectivity test` there, as it should be and with a policy that denies
cargo xtask e2e disrupt     ends and restarts parts of the cluster while 50 pods have connections
cargo xtask e2e migrate     moves all pods to another pool and back, while a Deployment with a budget serves
cargo xtask e2e coexist     runs kube-proxy in its modes, firewalld and Docker on the nodes, and compares connections with policy
cargo xtask e2e windows     an emulated Windows node joins; pods of both systems connect, with policy
cargo xtask e2e flannel     builds flanneld, and tests a node with Tortie beside one with it (no cluster is needed)
cargo xtask e2e lifecycle   on a cluster of its own: installs, tests with five specs, upgrades and uninstalls Tortie, and looks for
                            what is left
cargo xtask e2e upgrade [COMMIT]  on a cluster of its own: installs an earlier commit, and upgrades it under traffic
cargo xtask e2e kubectl ARGS, cargo xtask e2e tortie ARGS, cargo xtask e2e exec NODE COMMAND
                            runs kubectl or tortie there, or a command on a node
cargo xtask e2e restart NODE PROGRAM  kills containerd, kubelet or kube-proxy of a node, and starts it again
cargo xtask image [--arch amd64|arm64] [--name NAME] [--output FILE]
                            builds the container image, an OCI archive (target/image/tortie.tar)
cargo xtask arm64           builds the programs of the image for arm64, and runs them under QEMU
cargo xtask windows [--debian]
                            builds and checks tortie.exe and tortie-cni.exe, and the libraries of an emulated HNS for Wine;
                            with Debian's compiler, which it also uses if Rust's library for Windows cannot be had
cargo xtask wine            runs tortie.exe and tortie-cni.exe under Wine, on an emulated HNS
cargo xtask wine clients [--short|plugins|kube-proxy|tortie|flannel|hcsshim|bgp]
                            runs CNI plugins, kube-proxy (tortie: beside the agent), flanneld, hcsshim's tests and BGP there
cargo xtask wine exec PROGRAM [ARGS]
                            runs another Windows program there, on an HNS that accepts what HNS accepts
cargo xtask manifests       writes the generated files in deploy/
cargo xtask mutations [--skip-baseline] [NAME…]
                            reports which mistakes of tests/mutations the tests notice; needs root, and hours for all of them
cargo xtask bench [NAME]    measurements beside named peers: addresses, bgp, calc, cni, demo, kubernetes, nftables, vxlan,
                            windows; all without NAME
cargo xtask vectors FILE… [--on program|oracle|kernel|emulator|server|etcd]
                            replays files of published verdicts; fails where one differs; kernel needs root";

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// The files whose `match` on the arguments decides what is accepted, and what a task of the file begins with.
    const TASKS: [(&str, &str); 4] = [
        ("", include_str!("main.rs")),
        ("e2e ", include_str!("../../judges/e2e/src/main.rs")),
        ("kube ", include_str!("../../judges/e2e/src/kube.rs")),
        ("wine ", include_str!("../../judges/wine/src/main.rs")),
    ];
    /// What programs start, and people do not.
    const INTERNAL: [&str; 4] = ["e2e serve", "e2e windows-node", "kube serve", "e2e DUAL_STACK"];

    /// The patterns of words that the `match` accepts, such as `["up", "--dual-stack"]`.
    fn accepted(source: &str) -> Vec<Vec<String>> {
        let start = source.lines().skip_while(|line| {
            !line.contains("match arguments {") && !line.contains("match words.as_slice() {")
        });
        let arms = start.skip(1).take_while(|line| !line.starts_with("    }")).map(str::trim);
        let patterns = arms.filter(|line| line.starts_with('[')).filter_map(|line| line.split_once("] =>"));
        patterns
            .map(|(pattern, _)| {
                let words = pattern.trim_start_matches('[').split(", ");
                words
                    .filter_map(|word| word.strip_prefix('"')?.strip_suffix('"'))
                    .map(str::to_owned)
                    .collect()
            })
            .collect()
    }

    /// The texts of a constant, which is a list.
    fn names(constant: &str, source: &str) -> Vec<String> {
        let list = source.split_once(&format!("const {constant}: [&str;")).unwrap().1;
        let list = list.split_once('=').unwrap().1.split(']').next().unwrap();
        let names: Vec<String> = list.split('"').skip(1).step_by(2).map(str::to_owned).collect();
        assert!(names.len() > 5, "{constant}: {names:?}");
        names
    }

    /// The tasks of [`USAGE`]: `e2e up`. One line can have several: `kube up|down`.
    fn shown() -> BTreeSet<String> {
        let tasks = USAGE.split("cargo xtask ").skip(1);
        let words = tasks.map(|task| task.split_whitespace().take(2).collect::<Vec<_>>());
        let mut shown = BTreeSet::new();
        for words in words {
            shown.insert(words[0].to_owned());
            let second = words.get(1).copied().unwrap_or_default().trim_end_matches(',');
            shown.extend(second.split('|').map(|word| format!("{} {word}", words[0])));
        }
        shown
    }

    #[test]
    fn all_that_is_accepted_is_shown() {
        let shown = shown();
        for (prefix, source) in TASKS {
            let accepted = accepted(source);
            assert!(accepted.len() > 2, "{prefix}: {accepted:?}");
            for words in accepted.iter().filter(|words| !words.is_empty()) {
                let task = format!("{prefix}{}", words[0]);
                if INTERNAL.contains(&task.as_str()) {
                    continue;
                }
                assert!(shown.contains(&task), "USAGE lacks {task}");
                for option in words.iter().filter(|word| word.starts_with("--")) {
                    let of_task = USAGE.split("cargo xtask ").find(|text| text.starts_with(&task)).unwrap();
                    assert!(of_task.contains(option.as_str()), "USAGE lacks {task} {option}");
                }
            }
        }
    }

    #[test]
    fn all_commands_of_clusters_are_accepted_and_shown() {
        let accepted: BTreeSet<String> =
            accepted(TASKS[1].1).into_iter().filter_map(|words| words.into_iter().next()).collect();
        for command in names("COMMANDS", TASKS[1].1) {
            assert!(accepted.contains(&command), "{command} has no arm");
            assert!(shown().contains(&format!("e2e {command}")), "USAGE lacks e2e {command}");
        }
    }

    #[test]
    fn all_measurements_are_shown() {
        let bench = USAGE.split("cargo xtask bench").nth(1).unwrap();
        let words: BTreeSet<&str> = bench.split(|c: char| !c.is_ascii_alphanumeric()).collect();
        for name in names("NAMES", include_str!("../../judges/bench/src/main.rs")) {
            assert!(words.contains(name.as_str()), "USAGE lacks bench {name}");
        }
    }
}
