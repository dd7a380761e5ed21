//! The network of a lab, as its pods and nodes see it.

use super::support::{Lab, User};

/// Entries of the neighbour table that are not permanent are counted for the whole machine, and room is for 1,024 of
/// them: pods that resolve each other would make labs fail each other.
#[test]
fn nobody_depends_on_the_machines_neighbour_table() {
    let lab = Lab::new(User::Root);
    let mut running = lab.up(&["--linux", "2"]);
    lab.ok(&["apply", "-f", &lab.example("policy-demo-pods.yml")]);
    lab.wait_for_pods();
    lab.json(&["lab", "matrix", "-o", "json", "--port", "80"]);
    let pods = ["linux-client", "linux-server", "windows-client", "windows-server"];
    let mut tables = Vec::new();
    for pod in pods {
        let name = format!("calico-demo/{pod}");
        tables.push((name.clone(), lab.ok(&["lab", "exec", &name, "--", "cat", "/proc/net/arp"])));
    }
    for node in ["primary", "linux-2", "minion"] {
        tables.push((node.to_owned(), lab.ok(&["lab", "capture", node, "--", "cat", "/proc/net/arp"])));
    }
    for (name, table) in tables {
        let entries: Vec<&str> = table.lines().skip(1).collect();
        assert!(!entries.is_empty(), "{name} has a neighbour");
        // 0x6 is complete and permanent.
        let counted: Vec<_> =
            entries.iter().filter(|line| line.split_whitespace().nth(2) != Some("0x6")).collect();
        assert!(counted.is_empty(), "{name}: {counted:?}");
    }
    lab.ok(&["lab", "down"]);
    running.wait();
}
