//! BIRD's speakers.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use tortie_servers::programs::Program;

use crate::lab::{AS, Lab, PATIENCE, ipv4};
use crate::tortie::{extra, routes};
use crate::{Figures, PREFIXES, ROUTES, resident};

/// A pause between two rounds of questions.
const PAUSE: Duration = Duration::from_millis(2);

fn file(lab: &Lab, node: u8) -> PathBuf {
    lab.path(&format!("mesh{node}.conf"))
}

fn write(lab: &Lab, node: u8, count: u8, more: usize) {
    let own = ipv4(node);
    let mut text = format!(
        "log stderr {{ error, fatal }};\nrouter id {own};\nprotocol device {{}}\nprotocol direct {{ ipv4; }}\n"
    );
    let extra = (0..more).map(|number| extra(number).parse().unwrap());
    let list: String =
        routes(node, count).chain(extra).map(|prefix| format!("route {prefix} blackhole;\n")).collect();
    writeln!(text, "protocol static own {{ ipv4; {list} }}").unwrap();
    for other in (1..=count).filter(|other| *other != node) {
        let address = ipv4(other);
        let passive = if address.to_string() > own.to_string() { "on" } else { "off" };
        writeln!(
            text,
            "protocol bgp n{other} {{ local {own} as {AS}; neighbor {address} as {AS}; passive {passive};
            connect delay time 1; connect retry time 1; graceful restart on;
            ipv4 {{ import all; export where source = RTS_STATIC; }}; }}"
        )
        .unwrap();
    }
    std::fs::write(file(lab, node), text).unwrap();
}

/// A connection to BIRD's control socket.
struct Control(UnixStream);

impl Control {
    fn open(path: &PathBuf) -> Self {
        let begin = Instant::now();
        loop {
            if let Ok(stream) = UnixStream::connect(path) {
                let mut control = Self(stream);
                control.answer();
                return control;
            }
            assert!(begin.elapsed() < PATIENCE, "BIRD does not answer");
            std::thread::sleep(PAUSE);
        }
    }

    fn ask(&mut self, question: &str) -> String {
        writeln!(self.0, "{question}").unwrap();
        self.answer()
    }

    /// Lines until one whose code is followed by a space.
    fn answer(&mut self) -> String {
        let mut text = Vec::new();
        let mut buffer = [0; 4096];
        loop {
            let count = self.0.read(&mut buffer).unwrap();
            text.extend(&buffer[..count]);
            let read = String::from_utf8_lossy(&text);
            let last = read.trim_end_matches('\n').rsplit('\n').next().unwrap_or_default();
            let is_end = last.len() >= 5
                && last.as_bytes()[4] == b' '
                && last[..4].bytes().all(|b| b.is_ascii_digit());
            if count == 0 || read.ends_with('\n') && is_end {
                return read.into_owned();
            }
        }
    }

    /// The number of routes, without that of the node's network. The answer begins with `1007-COUNT of `.
    fn count(&mut self) -> usize {
        let answer = self.ask("show route count");
        let first = answer.split(' ').next().unwrap_or_default();
        let number = first.split_once('-').and_then(|(_, number)| number.parse::<usize>().ok());
        number.unwrap_or(0).saturating_sub(1)
    }
}

pub(crate) fn measure(lab: &Lab, count: u8) -> Figures {
    (1..=count).for_each(|node| write(lab, node, count, 0));
    let socket = |node: u8| lab.path(&format!("mesh{node}.ctl"));
    let begin = Instant::now();
    let daemons: Vec<_> = (1..=count)
        .map(|node| {
            let (file, socket) = (file(lab, node).display().to_string(), socket(node).display().to_string());
            lab.start(node, &format!("mesh{node}"), Program::Bird, &["-f", "-c", &file, "-s", &socket])
        })
        .collect();
    let mut controls: Vec<Control> = (1..=count).map(|node| Control::open(&socket(node))).collect();
    let wanted = ROUTES / usize::from(count) * usize::from(count);
    wait(&mut controls, |control| control.count() >= wanted);
    let full = begin.elapsed();
    let memory = daemons.iter().map(|daemon| resident(daemon.id())).sum::<usize>() / daemons.len();
    let prefix = (0..PREFIXES)
        .map(|number| {
            write(lab, 1, count, number + 1);
            let begin = Instant::now();
            let answer = controls[0].ask("configure");
            assert!(answer.contains("Reconfigur"), "{answer}");
            let prefix = extra(number);
            wait(&mut controls[1..], |control| {
                control.ask(&format!("show route {prefix}")).contains(&prefix)
            });
            begin.elapsed()
        })
        .collect();
    Figures { full, memory, prefix }
}

/// Asks all until each answer was right once.
fn wait(controls: &mut [Control], is_right: impl Fn(&mut Control) -> bool) {
    let begin = Instant::now();
    let mut open: Vec<&mut Control> = controls.iter_mut().collect();
    loop {
        open.retain_mut(|control| !is_right(control));
        if open.is_empty() {
            return;
        }
        assert!(begin.elapsed() < PATIENCE * 2, "BIRD's tables do not fill");
        std::thread::sleep(PAUSE);
    }
}
