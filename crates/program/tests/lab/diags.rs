//! `tortie node diags` on a node with pods and policy, with and without its agent.

use std::collections::BTreeMap;
use std::io::Read;

use flate2::read::GzDecoder;
use rustix::process::Signal;
use serde_json::Value;
use tar::Archive;

use crate::support::{Lab, User, leftovers};

const POLICY: &str = "
apiVersion: projectcalico.org/v3
kind: NetworkPolicy
metadata: {name: web-only, namespace: calico-demo}
spec: {selector: all(), types: [Ingress], ingress: [{action: Allow, protocol: TCP, destination: {ports: [80]}}]}
";

/// The files of an archive, by their name.
fn files(path: &str) -> BTreeMap<String, String> {
    let mut archive = Archive::new(GzDecoder::new(std::fs::File::open(path).unwrap()));
    let mut files = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let (name, mut bytes) = (entry.path().unwrap().display().to_string(), Vec::new());
        entry.read_to_end(&mut bytes).unwrap();
        let name = name.trim_start_matches("tortie-node-diags/").to_owned();
        files.insert(name, String::from_utf8_lossy(&bytes).into_owned());
    }
    files
}

/// Runs the command on a node. Returns the files, and what is missing.
fn diags(lab: &Lab, file: &str, socket: &str) -> (BTreeMap<String, String>, Value) {
    let program = env!("CARGO_BIN_EXE_tortie");
    let place = lab.dir().with_file_name(file).display().to_string();
    let command = ["node", "diags", "-o", &place, "--agent-socket", socket];
    lab.ok(&[&["lab", "capture", "primary", "--", program], &command[..]].concat());
    let files = files(&place);
    let info: Value = serde_json::from_str(&files["info.json"]).unwrap();
    (files, info["missing"].clone())
}

#[test]
fn a_node_is_described_with_and_without_its_agent() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&[]);
    let policy = lab.file("policy.yml", POLICY);
    for file in [lab.example("policy-demo-pods.yml"), policy] {
        lab.ok(&["apply", "--wait", "-f", &file]);
    }
    let agent = lab.processes().into_iter().find(|process| process.command.contains("agent --node primary"));
    let agent = agent.unwrap().command;
    let socket = agent.split_whitespace().skip_while(|word| *word != "--control-socket").nth(1).unwrap();

    let (found, missing) = diags(&lab, "with.tar.gz", socket);
    for (file, parts) in [
        ("network/nftables-own.txt", &["table inet tortie", "\nset ", "\nchain ", "web-only"][..]),
        ("network/links.txt", &["vxlan.calico vxlan up", "cali"]),
        ("network/addresses.txt", &["192.0.2.11/24"]),
        ("network/routes.txt", &["route to 10.244."]),
        ("network/forwarding.txt", &["behind 192.0.2.12"]),
        ("proc/net/arp", &["IP address"]),
        ("sysctl/net-ipv4.txt", &["net/ipv4/ip_forward = 1"]),
        ("agent/log-level.json", &["logLevel"]),
    ] {
        let text = found.get(file).unwrap_or_else(|| panic!("{file} is missing: {missing:#}"));
        parts.iter().for_each(|part| assert!(text.contains(part), "{file} has no {part:?}:\n{text}"));
    }
    let network = missing.as_object().unwrap().keys().filter(|name| name.starts_with("network/"));
    assert_eq!(network.count(), 0, "{missing:#}");

    let (found, missing) = diags(&lab, "without.tar.gz", "/nowhere");
    assert!(found["network/nftables-own.txt"].contains("web-only"));
    assert!(missing["agent/log-level.json"].as_str().unwrap().contains("/nowhere"), "{missing:#}");

    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(&lab), Vec::<String>::new());
}
