//! Two labs at once with many pods, and commands that are interrupted.

use std::os::unix::process::ExitStatusExt;

use rustix::process::Signal;

use crate::support::{Lab, Running, User, leftovers};
use crate::workloads::get;

const COUNT: usize = 100;

const PODS: &str = r#"
apiVersion: apps/v1
kind: Deployment
metadata: {name: web}
spec:
  replicas: 100
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec: {containers: [{name: web, ports: [{containerPort: 80}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIP: 10.96.0.30, selector: {app: web}, ports: [{port: 80}]}
"#;

fn down(lab: &Lab, mut running: Running) {
    running.signal(Signal::TERM);
    running.wait();
    assert_eq!(leftovers(lab), Vec::<String>::new());
}

/// The labs have the same addresses and names, and know nothing of each other.
#[test]
fn two_labs_with_a_hundred_pods_each() {
    let labs = [User::Root, User::Ordinary].map(|user| {
        let lab = Lab::new(user);
        let running = lab.up(&["--linux", "2"]);
        (lab, running)
    });
    std::thread::scope(|scope| {
        for (lab, _) in &labs {
            scope.spawn(|| {
                lab.ok(&["apply", "--wait", "--timeout", "300", "-f", &lab.file("pods.yml", PODS)])
            });
        }
    });
    let check = |lab: &Lab| {
        let pods = lab.json(&["get", "pods", "-n", "default", "-o", "json"])["items"].clone();
        let pods = pods.as_array().unwrap();
        let running = pods.iter().filter(|pod| pod["status"]["phase"] == "Running");
        assert_eq!(running.count(), COUNT);
        let on = |node: &str| pods.iter().find(|pod| pod["spec"]["nodeName"] == node).unwrap();
        for node in ["primary", "minion"] {
            let from = format!("default/{}", on(node)["metadata"]["name"].as_str().unwrap());
            lab.wait_until(&format!("{from} reaches the Service"), || {
                get(lab, &["exec", &from], "10.96.0.30/80")
                    .is_some_and(|page| page.contains("pod default/web-"))
            });
        }
    };
    labs.iter().for_each(|(lab, _)| check(lab));
    // One of them ends, and the other one stays.
    let [(first, first_running), (second, second_running)] = labs;
    down(&first, first_running);
    check(&second);
    down(&second, second_running);
}

/// Ctrl-C ends each command that waits, and the lab goes on.
#[test]
fn an_interrupt_ends_each_command_that_waits() {
    let lab = Lab::new(User::Root);
    let running = lab.up(&[]);
    lab.ok(&["apply", "--wait", "-f", &lab.example("policy-demo-pods.yml")]);
    lab.ok(&["apply", "--wait", "-f", &lab.example("policy-demo-policy.yml")]);
    let nowhere = lab.file(
        "nowhere.yml",
        "apiVersion: v1\nkind: Pod\nmetadata: {name: nowhere}\nspec: {nodeSelector: {'no': node}, containers: [{name: c}]}\n",
    );
    for (arguments, line) in [
        (&["get", "pods", "-w"][..], "linux-client"),
        (&["apply", "--wait", "--timeout", "600", "-f", &nowhere], "Pod default/nowhere created"),
        (
            &["lab", "exec", "calico-demo/linux-client", "--", "sh", "-c", "echo begun; exec sleep 4242"],
            "begun",
        ),
        (&["lab", "capture", "primary", "--", "sh", "-c", "echo begun; exec sleep 4242"], "begun"),
    ] {
        let mut command = lab.start(arguments);
        command.wait_for_line(line);
        command.signal(Signal::INT);
        let status = command.wait();
        assert!(status.signal() == Some(2) || status.code() == Some(130), "{arguments:?}: {status}");
        assert!(lab.ok(&["get", "nodes"]).contains("minion"), "{arguments:?}");
    }
    let left = lab.processes().into_iter().filter(|process| process.command.contains("4242"));
    assert_eq!(left.count(), 0, "what the commands started ends with them");
    down(&lab, running);
}
