//! Runs jobs side by side on a machine with few cores. Many tests compute, and many mostly wait for servers, timers and packets.
//!
//! As many jobs as cores run at all times. Another one begins whenever the machine has been idle by a third of a core for a moment, so
//! that a job that computes takes a core, and one that waits runs beside it. On a machine that others keep busy, no more than those run.

use std::collections::VecDeque;
use std::fs;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};

/// The most jobs that run at once. Each may start servers.
const MOST: usize = 8;
/// The time between two looks at the machine, and the share of one core that must have been idle meanwhile.
const LOOK: Duration = Duration::from_millis(1500);
const IDLE: f64 = 0.35;
/// The time after which a job is killed.
const DEADLINE: Duration = Duration::from_secs(30 * 60);
/// The number of the slowest tests that the summary shows.
const SHOWN: usize = 10;

/// Jobs of which one runs at a time, by the beginning of their names: tests of labs compare the mounts of the machine before and
/// after, and those of CNI make some.
const ONE_AT_A_TIME: [&str; 2] = ["tortie-program/lab", "tortie-program/cni"];

/// The jobs that take longest, by the beginning of their names. They begin first, so that none of them is left alone at the end.
const LONGEST: [&str; 15] = [
    "the programs for Windows",
    "tortie-windows/integration/dataplane",
    "tortie-program/lab",
    "tortie-agent/integration",
    "tortie-controllers/integration",
    "tortie-program/cni",
    "tortie-linux/integration/dataplane",
    "tortie-store/integration/kubernetes",
    "tortie-program/integration/examples",
    "tortie-windows/integration/clusters",
    "tortie-windows/integration/faults",
    "Calico's verdicts, by this kernel",
    "tortie-program/integration/served",
    "tortie-store",
    "tortie-calc",
];

/// A process to run.
pub(crate) struct Job {
    name: String,
    command: Command,
    /// The command by which a person repeats it.
    repeat: Option<String>,
    /// The number of tests that it must run.
    tests: Option<usize>,
    /// The job that must have succeeded before.
    after: Option<&'static str>,
}

impl Job {
    pub(crate) fn new(name: impl Into<String>, command: Command) -> Self {
        Self { name: name.into(), command, repeat: None, tests: None, after: None }
    }

    pub(crate) fn repeated_by(self, repeat: String) -> Self {
        Self { repeat: Some(repeat), ..self }
    }

    pub(crate) fn expecting(self, tests: usize) -> Self {
        Self { tests: Some(tests), ..self }
    }

    pub(crate) fn after(self, job: &'static str) -> Self {
        Self { after: Some(job), ..self }
    }

    fn is_single(&self) -> bool {
        ONE_AT_A_TIME.iter().any(|single| self.name.starts_with(single))
    }

    fn rank(&self) -> usize {
        LONGEST.iter().position(|long| self.name.starts_with(long)).unwrap_or(LONGEST.len())
    }
}

/// A job that runs.
struct Running {
    job: Job,
    child: Child,
    output: tempfile::NamedTempFile,
    begun: Instant,
    /// The seconds of a core that it has used so far.
    computed: f64,
}

/// A job that has ended.
struct Ended {
    job: Job,
    result: Result<ExitStatus>,
    took: Duration,
    computed: f64,
    output: String,
}

impl Ended {
    /// The reason why the job counts as failed.
    fn failure(&self) -> Option<String> {
        match &self.result {
            Err(error) => Some(format!("{error:#}")),
            Ok(status) if !status.success() => Some(status.to_string()),
            Ok(_) => self.job.tests.and_then(|expected| {
                let ran = passed(&self.output);
                (ran != expected).then(|| format!("{ran} of {expected} tests passed"))
            }),
        }
    }
}

/// The times of what ran, for the summary.
#[derive(Default)]
pub(crate) struct Times {
    steps: Vec<(String, Duration)>,
    /// The jobs, with the seconds of a core that each has used.
    jobs: Vec<(String, Duration, f64)>,
    tests: Vec<(String, Duration)>,
}

impl Times {
    /// Does a step of the gate, and keeps its time.
    pub(crate) fn step<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let begun = Instant::now();
        let result = setup::step(name, work)?;
        self.steps.push((name.to_owned(), begun.elapsed()));
        Ok(result)
    }

    /// Prints the time of each step, and the slowest tests.
    pub(crate) fn print(&self) {
        println!("==> seconds of each step:");
        for (name, took) in &self.steps {
            println!("{:>8.1}  {name}", took.as_secs_f64());
        }
        let mut jobs: Vec<_> = self.jobs.iter().collect();
        jobs.sort_by_key(|(_, took, _)| std::cmp::Reverse(*took));
        println!("==> seconds of each job, and of a core that it used without its servers:");
        for (name, took, computed) in jobs {
            println!("{:>8.1} {computed:>8.1}  {name}", took.as_secs_f64());
        }
        let mut tests: Vec<_> = self.tests.iter().collect();
        tests.sort_by_key(|(_, took)| std::cmp::Reverse(*took));
        println!("==> seconds of the {SHOWN} slowest tests:");
        for (name, took) in tests.into_iter().take(SHOWN) {
            println!("{:>8.1}  {name}", took.as_secs_f64());
        }
    }
}

/// Runs all jobs, and reports every failure, not only the first. Adds the times.
pub(crate) fn run(jobs: Vec<Job>, times: &mut Times) -> Result<()> {
    let number = jobs.len();
    let mut queue = Queue::new(jobs);
    let mut running: Vec<Running> = Vec::new();
    let mut ended: Vec<String> = Vec::new();
    let mut failed = Vec::new();
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let mut machine = Machine::new();
    while !(queue.waiting.is_empty() && running.is_empty()) {
        let has_room = running.len() < cores || running.len() < MOST && machine.has_been_idle();
        let is_busy = running.iter().any(|running| running.job.is_single());
        if has_room && let Some(job) = queue.next(is_busy, &ended) {
            let name = job.name.clone();
            match start(job) {
                Ok(begun) => running.push(begun),
                Err(error) => failed.push(format!("{name}: {error:#}")),
            }
            machine = Machine::new();
            continue;
        }
        if running.is_empty() {
            // All that wait do so for jobs that have failed.
            failed.extend(queue.waiting.drain(..).map(|job| format!("{}: not run", job.name)));
        }
        std::thread::sleep(Duration::from_millis(50));
        for index in (0..running.len()).rev() {
            let Some(result) = outcome(&mut running[index]) else { continue };
            let end = finish(running.swap_remove(index), result);
            print(&end, times);
            match end.failure() {
                None => ended.push(end.job.name),
                Some(failure) => failed.push(format!("{}: {failure}", end.job.name)),
            }
        }
    }
    ensure!(failed.is_empty(), "{} of {number} jobs failed:\n{}", failed.len(), failed.join("\n"));
    println!("==> {number} jobs passed");
    Ok(())
}

/// The jobs that wait.
struct Queue {
    waiting: VecDeque<Job>,
}

impl Queue {
    fn new(mut jobs: Vec<Job>) -> Self {
        jobs.sort_by_key(Job::rank);
        Self { waiting: jobs.into() }
    }

    /// Takes the next job that may run after those that have ended, and beside a single one if one runs.
    fn next(&mut self, is_busy: bool, ended: &[String]) -> Option<Job> {
        let may_run = |job: &Job| {
            let is_ready = job.after.is_none_or(|before| ended.iter().any(|name| name == before));
            is_ready && !(is_busy && job.is_single())
        };
        let position = self.waiting.iter().position(may_run)?;
        self.waiting.remove(position)
    }
}

/// The idle time of the machine since a moment.
struct Machine {
    since: Instant,
    idle: Option<f64>,
}

impl Machine {
    fn new() -> Self {
        Self { since: Instant::now(), idle: idle_seconds() }
    }

    /// True if a part of a core was idle since the last look, which must be some time ago.
    fn has_been_idle(&mut self) -> bool {
        let elapsed = self.since.elapsed();
        if elapsed < LOOK {
            return false;
        }
        let before = std::mem::replace(self, Self::new());
        match (before.idle, self.idle) {
            (Some(before), Some(now)) => now - before > IDLE * elapsed.as_secs_f64(),
            _ => false,
        }
    }
}

/// The seconds that all cores together were idle since the machine's start: the second number of `/proc/uptime` (proc(5)).
fn idle_seconds() -> Option<f64> {
    fs::read_to_string("/proc/uptime").ok()?.split_whitespace().nth(1)?.parse().ok()
}

fn start(mut job: Job) -> Result<Running> {
    let output = tempfile::NamedTempFile::new()?;
    println!("==> {} begins; its output is in {}", job.name, output.path().display());
    // Both streams share one position in the file.
    job.command
        .stdin(Stdio::null())
        .stdout(output.as_file().try_clone()?)
        .stderr(output.as_file().try_clone()?);
    let child = job.command.spawn().with_context(|| format!("{:?}", job.command))?;
    Ok(Running { job, child, output, begun: Instant::now(), computed: 0.0 })
}

/// Returns the end of a job, if it has ended. Kills a job that runs too long.
fn outcome(running: &mut Running) -> Option<Result<ExitStatus>> {
    // Only until it is waited for.
    running.computed = computed(running.child.id()).unwrap_or(running.computed);
    match running.child.try_wait() {
        Ok(Some(status)) => Some(Ok(status)),
        Ok(None) if running.begun.elapsed() < DEADLINE => None,
        Ok(None) => Some(kill(&mut running.child)),
        Err(error) => Some(Err(error.into())),
    }
}

/// The seconds of a core that a process and its ended children have used: `utime` to `cstime` of `/proc/PID/stat` (proc(5)).
fn computed(process: u32) -> Option<f64> {
    let text = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    let fields = text.rsplit_once(") ")?.1.split(' ').skip(11).take(4);
    let ticks: Vec<f64> = fields.map_while(|ticks| ticks.parse().ok()).collect();
    // Linux counts 100 ticks a second for programs on all its architectures.
    (ticks.len() == 4).then(|| ticks.iter().sum::<f64>() / 100.0)
}

fn kill(child: &mut Child) -> Result<ExitStatus> {
    child.kill()?;
    child.wait()?;
    bail!("killed, because it ran for {} minutes", DEADLINE.as_secs() / 60)
}

fn finish(running: Running, result: Result<ExitStatus>) -> Ended {
    let text = fs::read(running.output.path());
    let output =
        text.map_or_else(|error| error.to_string(), |text| String::from_utf8_lossy(&text).into_owned());
    Ended { job: running.job, result, took: running.begun.elapsed(), computed: running.computed, output }
}

/// Prints the output, and keeps the times.
fn print(ended: &Ended, times: &mut Times) {
    let Ended { job, took, computed, output, .. } = ended;
    let how = ended.failure().map_or_else(|| "passed".to_owned(), |failure| format!("FAILED: {failure}"));
    println!("==> {}, {} s: {how}", job.name, took.as_secs());
    println!("{}", output.trim_end());
    if let (Some(_), Some(repeat)) = (ended.failure(), &job.repeat) {
        println!("==> to repeat it: {repeat}");
    }
    times.jobs.push((job.name.clone(), *took, *computed));
    times.tests.extend(test_times(output).map(|(test, took)| (format!("{} {test}", job.name), took)));
}

/// The tests and their times in the output of the harness: `test a::b ... ok <1.234s>`.
fn test_times(output: &str) -> impl Iterator<Item = (String, Duration)> + '_ {
    output.lines().filter_map(|line| {
        let (test, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
        let seconds = rest.rsplit_once('<')?.1.strip_suffix("s>")?;
        Some((test.to_owned(), Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?))
    })
}

/// The number of tests that have passed, by the closing line of the harness.
fn passed(output: &str) -> usize {
    let closing = output.lines().filter_map(|line| line.strip_prefix("test result: ok. "));
    closing.filter_map(|line| line.split(' ').next()?.parse::<usize>().ok()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(name: &str) -> Job {
        Job::new(name, Command::new("/bin/true"))
    }

    /// The names of the jobs that may begin, one after the other, while a single one runs or not.
    fn names(queue: &mut Queue, is_busy: bool, ended: &[&str]) -> Vec<String> {
        let ended: Vec<String> = ended.iter().map(|name| (*name).to_owned()).collect();
        std::iter::from_fn(|| queue.next(is_busy, &ended)).map(|job| job.name).collect()
    }

    #[test]
    fn jobs_that_disturb_each_other_do_not_run_side_by_side() {
        let single = ONE_AT_A_TIME.map(job);
        let mut queue = Queue::new(single.into_iter().chain([job("a")]).collect());
        assert_eq!(names(&mut queue, true, &[]), ["a"]);
        assert_eq!(queue.waiting.len(), ONE_AT_A_TIME.len());
        assert_eq!(queue.next(false, &[]).unwrap().name, ONE_AT_A_TIME[0]);
    }

    #[test]
    fn a_job_waits_for_another_and_the_longest_begins_first() {
        let mut queue = Queue::new(vec![job("late").after("early"), job("x"), job(LONGEST[0])]);
        assert_eq!(names(&mut queue, false, &["x"]), [LONGEST[0], "x"]);
        assert_eq!(names(&mut queue, false, &["early"]), ["late"]);
    }

    /// Runs a shell script as a job that must pass this many tests.
    fn ran(script: &str, tests: Option<usize>) -> (Result<()>, Times) {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        let mut times = Times::default();
        let result = run(vec![Job { tests, ..Job::new("j", command) }], &mut times);
        (result, times)
    }

    #[test]
    fn a_failure_is_reported_and_so_is_a_test_that_did_not_run() {
        let passed = "echo 'test a::b ... ok <0.500s>'; echo 'test result: ok. 1 passed; 0 failed'";
        let (result, times) = ran(passed, Some(1));
        result.unwrap();
        assert_eq!(times.jobs.len(), 1);
        assert_eq!(times.tests, [("j a::b".to_owned(), Duration::from_millis(500))]);
        let lost = ran(passed, Some(2)).0.unwrap_err().to_string();
        assert!(lost.contains("1 of 2 tests passed"), "{lost}");
        let failed = ran("exit 3", None).0.unwrap_err().to_string();
        assert!(failed.contains("j: exit status: 3"), "{failed}");
    }

    #[test]
    fn what_waits_for_a_failed_job_is_not_run() {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", "exit 1"]);
        let jobs = vec![Job::new("first", command), job("second").after("first")];
        let error = run(jobs, &mut Times::default()).unwrap_err().to_string();
        assert!(error.contains("first: exit status: 1"), "{error}");
    }

    #[test]
    fn a_program_that_is_missing_fails() {
        let error = run(vec![Job::new("j", Command::new("/nothing"))], &mut Times::default()).unwrap_err();
        assert!(error.to_string().contains("/nothing"), "{error}");
    }
}
