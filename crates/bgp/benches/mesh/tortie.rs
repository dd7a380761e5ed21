//! Tortie's speakers: this program again, one process each.

use std::collections::BTreeSet;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use ipnet::IpNet;
use tortie_bgp::rib::OwnRoute;
use tortie_bgp::speaker::{RouteEvent, Speaker};
use tortie_kernel::namespace::die_with_parent;

use crate::lab::{AS, Lab, config, ipv4, peer};
use crate::{Figures, PREFIXES, ROUTES, resident};

/// The routes of a node.
pub(crate) fn routes(node: u8, count: u8) -> impl Iterator<Item = IpNet> {
    let each = ROUTES / usize::from(count);
    (0..each).map(move |number| {
        format!("10.{}.{}.{}/32", 100 + u32::from(node), number / 256, number % 256).parse().unwrap()
    })
}

/// The prefix that is added last.
pub(crate) fn extra(number: usize) -> String {
    format!("192.0.2.{number}/32")
}

/// A speaker as a process: reports on standard output, and adds a prefix for each line of standard input.
pub(crate) fn speak(node: u8, count: u8) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let others = (1..=count).filter(|other| *other != node).map(|other| {
            let mut peer = peer(node, other, AS);
            peer.session.hold_time = 240;
            peer.session.passive = ipv4(other).to_string() > ipv4(node).to_string();
            (other, peer)
        });
        let (speaker, mut events, _) = Speaker::start(config(node, others), None).await.unwrap();
        speaker.advertise(routes(node, count).map(|prefix| (prefix, OwnRoute::here()))).await.unwrap();
        let (lines, mut asked) = tokio::sync::mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines() {
                lines.send(line.unwrap()).unwrap();
            }
        });
        let (mut known, mut is_full) = (BTreeSet::new(), false);
        loop {
            tokio::select! {
                Some(line) = asked.recv() => {
                    speaker.advertise([(line.parse().unwrap(), OwnRoute::here())]).await.unwrap();
                }
                Some(event) = events.recv() => {
                    let RouteEvent::Changed(changes) = event else { continue };
                    for change in changes {
                        if is_full {
                            println!("seen {}", change.prefix);
                        } else {
                            known.insert(change.prefix);
                        }
                    }
                    if !is_full && known.len() == ROUTES / usize::from(count) * usize::from(count) {
                        is_full = true;
                        known = BTreeSet::new();
                        println!("full");
                    }
                }
            }
        }
    });
}

struct Process {
    child: Child,
    stdin: ChildStdin,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start(lab: &Lab, node: u8, count: u8, reports: std::sync::mpsc::Sender<String>) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--speaker", &node.to_string(), &count.to_string()]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    lab.namespace(node).enter_on_spawn(&mut command).unwrap();
    let mut child = die_with_parent(&mut command).spawn().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    std::thread::spawn(move || {
        output.lines().map_while(Result::ok).for_each(|line| drop(reports.send(line)))
    });
    let stdin = child.stdin.take().unwrap();
    Process { child, stdin }
}

fn wait_for(reports: &Receiver<String>, what: &str, times: usize) {
    let mut seen = 0;
    while seen < times {
        seen += usize::from(reports.recv_timeout(crate::lab::PATIENCE).unwrap() == what);
    }
}

pub(crate) fn measure(lab: &Lab, count: u8) -> Figures {
    let (sender, reports) = channel();
    let begin = Instant::now();
    let mut processes: Vec<Process> =
        (1..=count).map(|node| start(lab, node, count, sender.clone())).collect();
    wait_for(&reports, "full", count.into());
    let full = begin.elapsed();
    let memory =
        processes.iter().map(|process| resident(process.child.id())).sum::<usize>() / processes.len();
    let prefix = (0..PREFIXES)
        .map(|number| {
            let begin = Instant::now();
            writeln!(processes[0].stdin, "{}", extra(number)).unwrap();
            // The first speaker reports it, too.
            wait_for(&reports, &format!("seen {}", extra(number)), count.into());
            begin.elapsed()
        })
        .collect();
    Figures { full, memory, prefix }
}
