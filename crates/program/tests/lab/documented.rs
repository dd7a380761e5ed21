//! The commands in README.md and docs/*.md: each of them runs, or the table says why it does not.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::support::{Lab, User};

/// How a command is tested.
enum Run {
    /// It runs in the repository, without a cluster, and exits with this code. `/etc/tortie` is a temporary folder.
    Offline(i32),
    /// It runs in the lab of docs/try-it.md, in the order of the table, and exits with this code. `POD` is a pod of `stars`.
    InLab(i32),
    /// It does not run here, for this reason.
    No(&'static str),
}

use Run::{InLab, No, Offline};

/// Starts the lab of the table.
const UP: &str = "tortie lab up --linux 2 --windows 2";
const OTHER_TEST: &str = "another test of the lab runs it and compares its output";
const UNDER_WINE: &str = "needs the programs for Windows; `cargo xtask wine` runs it";
const KUBERNETES: &str = "needs a cluster of Kubernetes; tests/lab/kubernetes.rs and tests/integration/served/install.rs run such commands";
const PLACEHOLDER: &str = "its arguments are placeholders";
const OF_READER: &str = "its files are the reader's";
const FOREVER: &str = "runs until it is ended";

const COMMANDS: &[(&str, Run)] = &[
    ("tortie lab demo", No(OTHER_TEST)),
    ("tortie lab demo --wine", No(UNDER_WINE)),
    ("tortie lab up --windows 2 --wine", No(UNDER_WINE)),
    (UP, InLab(0)),
    ("tortie apply --wait -f examples/seed-002/policy-demo-pods.yml", InLab(0)),
    ("tortie apply --wait -f examples/seed-002/policy-demo-policy.yml", InLab(0)),
    ("tortie get pods", InLab(0)),
    ("tortie get nodereports", InLab(0)),
    ("tortie lab matrix", InLab(0)),
    ("tortie connectivity test", InLab(0)),
    ("tortie connectivity test --store kubernetes", No(KUBERNETES)),
    ("tortie routes", InLab(0)),
    ("tortie routes --for bird", InLab(0)),
    ("tortie routes --for aws --table rtb-0123456789abcdef0", No("nodes of the lab are no machines of AWS")),
    ("tortie get nodes,ipamblocks -o json > cluster.json", No(OF_READER)),
    ("tortie routes -f cluster.json --for linux --since known.json", No(OF_READER)),
    ("tortie routes -f cluster.json --since known.json -o json", No(OF_READER)),
    ("tortie explain calico-demo/linux-server calico-demo/windows-server", InLab(1)),
    ("tortie policy show windows-server -n calico-demo", InLab(0)),
    ("tortie policy cost", InLab(0)),
    ("tortie lab exec calico-demo/linux-client -- cat /proc/net/route", InLab(0)),
    ("tortie lab capture minion -- tcpdump -nn -i eth0 udp port 4789", No(FOREVER)),
    ("tortie delete namespace calico-demo", InLab(0)),
    ("tortie apply --wait -f examples/workloads/06-stars.yml", InLab(0)),
    ("tortie get replicationcontrollers,pods,services", InLab(0)),
    ("tortie patch replicationcontroller frontend -n stars -p '{\"spec\":{\"replicas\":3}}'", InLab(0)),
    ("tortie lab exec stars/POD -- getent hosts backend", InLab(0)),
    ("tortie lab down", InLab(0)),
    ("tortie explain -f examples/seed-002 calico-demo/linux-server calico-demo/windows-server", Offline(1)),
    ("tortie matrix -f examples/boutique/03-calico-tiers.yml", Offline(0)),
    (
        "tortie preview --in examples/seed-002/policy-demo-pods.yml -f examples/seed-002/policy-demo-policy.yml",
        Offline(1),
    ),
    ("tortie certs authority --dir /etc/tortie", Offline(0)),
    ("tortie certs store --dir /etc/tortie", Offline(0)),
    ("tortie certs node one --dir /etc/tortie", Offline(0)),
    ("tortie certs node two --dir /etc/tortie", Offline(0)),
    ("tortie policy test examples/ci/expectations.yaml -f examples/ci/shop.yml", Offline(1)),
    ("tortie policy lint -f examples/seed-002/policy-demo-pods.yml -f examples/ci/shadowed.yaml", Offline(1)),
    ("tortie policy cost networkpolicy/shop/front", No(OF_READER)),
    ("tortie policy cost shop/front-0", No(OF_READER)),
    ("tortie policy cost -f manifests/", No(OF_READER)),
    ("tortie apply --store unix:/run/tortie/store.sock -f cluster.yaml", No(OF_READER)),
    ("tortie install --pool 10.244.0.0/16", No(KUBERNETES)),
    (
        "tortie install --cni-plugins '[{\"type\": \"bandwidth\", \"capabilities\": {\"bandwidth\": true}}]'",
        No(KUBERNETES),
    ),
    ("tortie status", No(KUBERNETES)),
    ("tortie lab up --datastore kubernetes", No(OTHER_TEST)),
    ("tortie lab kubectl apply -f examples/seed-002/policy-demo-pods.yml", No(OTHER_TEST)),
    ("tortie lab kubectl wait --for=condition=Ready pod --all -n calico-demo", No(OTHER_TEST)),
    ("tortie lab kubectl get pods -A -o wide", No(OTHER_TEST)),
    ("tortie agent log-level", No("needs the agent of this machine")),
    ("tortie agent log-level info,tortie_store=debug", No("needs the agent of this machine")),
    ("tortie agent --node NAME --store kubernetes", No(PLACEHOLDER)),
    ("tortie agent --node two --store tls:192.0.2.1:6666", No(FOREVER)),
    ("tortie controllers --store kubernetes", No(FOREVER)),
    ("tortie controllers --store etcd:URL --kubernetes", No(PLACEHOLDER)),
    (
        "tortie pool migrate old new --cidr 10.250.0.0/16 --dry-run --store kubernetes",
        No("served/pool.rs runs it on a Kubernetes API"),
    ),
    (
        "tortie pool migrate old new --cidr 10.250.0.0/16 --store kubernetes",
        No("served/pool.rs runs it on a Kubernetes API"),
    ),
    ("tortie datastore lock", No(PLACEHOLDER)),
    ("tortie datastore export", No(PLACEHOLDER)),
    ("tortie datastore import", No(PLACEHOLDER)),
    ("tortie datastore unlock", No(PLACEHOLDER)),
    ("tortie install --bgp --encapsulation none", No(KUBERNETES)),
    ("tortie install --direct-routes --encapsulation none", No(KUBERNETES)),
    ("tortie install --policy-only", No(KUBERNETES)),
    ("tortie install --services --api-server 192.0.2.1:6443", No(KUBERNETES)),
    (
        "tortie install --ip-autodetection-method cidr=192.0.2.0/24 --ip6-autodetection-method first-found",
        No(KUBERNETES),
    ),
    ("tortie agent --node NAME --bgp", No(PLACEHOLDER)),
    ("tortie agent --node NAME --flannel --flannel-etcd", No(PLACEHOLDER)),
    ("tortie store init", No("served/store.rs runs it")),
    ("tortie store serve", No(FOREVER)),
    ("tortie store identity", No("served/store.rs runs it")),
    ("tortie store backup", No("served/store.rs runs it")),
    ("tortie store check", No("served/store.rs runs it")),
    ("tortie store restore", No("served/store.rs runs it")),
    ("tortie store repair", No("served/store.rs runs it")),
    ("tortie cluster diags -o cluster.tar.gz", No("served/cluster.rs runs it and reads the archive")),
    ("tortie node diags -o node.tar.gz", No("lab/diags.rs runs it on a node and reads the archive")),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The commands of a page, without comments.
fn commands(text: &str) -> Vec<String> {
    let mut is_fenced = false;
    let mut found = Vec::new();
    for line in text.lines() {
        is_fenced ^= line.starts_with("```");
        let is_code = is_fenced || line.starts_with("    ");
        let line = line.trim();
        let line = line.strip_prefix("$ ").unwrap_or(line).replace("cargo run --release -- ", "tortie ");
        if is_code && line.starts_with("tortie ") {
            let command = line.split("  #").next().unwrap_or_default().trim_end_matches('\\').trim();
            found.push(command.split_whitespace().collect::<Vec<_>>().join(" "));
        }
    }
    found
}

/// The words of a command line, as a shell splits them.
fn words(command: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for letter in command.chars() {
        match letter {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            letter => words.last_mut().unwrap().push(letter),
        }
    }
    words.into_iter().skip(1).collect()
}

fn run(lab: &Lab, command: &str, expected: i32) {
    let words = words(command);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let output = lab.tortie(&words).current_dir(root()).output().unwrap();
    let printed =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned()).concat();
    assert_eq!(output.status.code(), Some(expected), "{command}: {printed}");
}

#[test]
fn every_documented_command_is_known() {
    let docs = fs::read_dir(root().join("docs")).unwrap().flatten().map(|entry| entry.path());
    let pages: BTreeSet<PathBuf> = docs.chain([root().join("README.md")]).collect();
    let mut unused: BTreeSet<&str> = COMMANDS.iter().map(|(command, _)| *command).collect();
    let mut unknown = Vec::new();
    for page in pages.iter().filter(|page| page.extension().is_some_and(|ending| ending == "md")) {
        for command in commands(&fs::read_to_string(page).unwrap()) {
            // Of commands that do not run, the beginning is enough.
            let is_it = |(known, how): &&(&str, Run)| match how {
                No(_) => command == *known || command.starts_with(&format!("{known} ")),
                Offline(_) | InLab(_) => command == *known,
            };
            let exact = COMMANDS.iter().find(|(known, _)| command == *known);
            match exact.or_else(|| COMMANDS.iter().find(is_it)) {
                Some((known, _)) => drop(unused.remove(known)),
                None => unknown.push(format!("{}: {command}", page.display())),
            }
        }
    }
    for (command, how) in COMMANDS {
        if let No(why) = how {
            println!("not run: {command}: {why}");
        }
    }
    assert!(unknown.is_empty(), "add them to the table: {unknown:#?}");
    assert!(unused.is_empty(), "no page has them any more: {unused:#?}");
}

#[test]
fn documented_commands_without_a_cluster_work() {
    let lab = Lab::new(User::Root);
    let folder = lab.file("folder", "");
    let folder = Path::new(&folder).with_file_name("certificates").display().to_string();
    for (command, how) in COMMANDS {
        if let Offline(code) = how {
            run(&lab, &command.replace("/etc/tortie", &folder), *code);
        }
    }
}

#[test]
fn documented_commands_of_the_lab_work() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&words(UP)[2..].iter().map(String::as_str).collect::<Vec<_>>());
    for (command, how) in COMMANDS {
        let InLab(code) = how else { continue };
        if *command == UP {
            continue;
        }
        let command = match command.contains("POD") {
            true => command.replace("POD", &pod_of_stars(&lab)),
            false => (*command).to_owned(),
        };
        run(&lab, &command, *code);
    }
    assert_eq!(running.wait().code(), Some(0));
}

fn pod_of_stars(lab: &Lab) -> String {
    lab.wait_for_pods();
    let pods = lab.json(&["get", "pods", "-n", "stars", "-l", "role=frontend", "-o", "json"]);
    pods["items"][0]["metadata"]["name"].as_str().unwrap().to_owned()
}
