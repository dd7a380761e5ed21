//! Requests of operators to an agent.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use crate::common::{Bed, NODE, condition, endpoint_id, until};
use serde_json::json;
use tortie_agent::control::{Answer, Ask, Outcome, ask};
use tortie_cni::Command;
use tortie_dataplane::Reason;

fn show(pod: &str) -> Ask {
    Ask::Show { namespace: "n".to_owned(), pod: pod.to_owned() }
}

/// The test's thread must not block the agent's tasks.
async fn asked(bed: &Bed, question: Ask) -> Answer {
    let socket = bed.dir.path().join("control.sock");
    tokio::task::spawn_blocking(move || ask(&socket, question)).await.unwrap().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_is_shown_with_desired_and_actual_rules() {
    let bed = Bed::new().await;
    bed.pod("p", "uid", json!({})).await;
    bed.call(bed.invocation(Command::Add, "c1", "p")).await.unwrap();
    bed.os.lock().report.endpoints = [(endpoint_id("p"), vec![condition(Reason::RuleNotExpressible)])].into();
    // A resync returns the new report.
    (bed.os.lock().disturbed.as_ref().expect("the agent wants to know"))();
    until("the condition is known", || async {
        let answer = asked(&bed, show("p")).await;
        let Outcome::Shown(endpoints) = &answer.outcome else { panic!("{answer:?}") };
        let [endpoint] = endpoints.as_slice() else { panic!("{answer:?}") };
        assert_eq!((answer.node.as_str(), &endpoint.id), (NODE, &endpoint_id("p")));
        assert_eq!(&*endpoint.asked.endpoint.container_id, "c1");
        let profile = endpoint.asked.endpoint.program.profiles.first().expect("the namespace's profile");
        assert!(endpoint.asked.policies.iter().any(|(id, _)| id == profile), "{endpoint:?}");
        assert_eq!(endpoint.system.as_ref().unwrap().read_from, "the test's maps, p");
        endpoint.conditions.iter().any(|told| told.reason == "RuleNotExpressible")
    })
    .await;
    assert_eq!(asked(&bed, show("nobody")).await.outcome, Outcome::Shown(Vec::new()));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_own_user_may_query_and_invalid_queries_get_an_error() {
    let bed = Bed::new().await;
    for socket in ["control.sock", "agent.sock"] {
        let mode = std::fs::metadata(bed.dir.path().join(socket)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{socket}");
    }
    let socket = bed.dir.path().join("control.sock");
    let say = |text: &'static str| {
        let socket = socket.clone();
        tokio::task::spawn_blocking(move || {
            let mut stream = UnixStream::connect(socket).unwrap();
            stream.write_all(text.as_bytes()).unwrap();
            stream.shutdown(Shutdown::Write).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            serde_json::from_str::<Answer>(&answer).unwrap()
        })
    };
    for (text, wanted) in [
        ("meow", "cannot be read"),
        ("", "cannot be read"),
        (r#"{"version": 1, "ask": {"feed": "me"}}"#, "unknown variant `feed`"),
        (r#"{"version": 99, "ask": "anything"}"#, "speaks version 1"),
    ] {
        let Outcome::Failed(problem) = say(text).await.unwrap().outcome else { panic!("{text}") };
        assert!(problem.contains(wanted), "{text}: {problem}");
    }
}
