use super::*;

mod keys;
mod schema;

fn spec(flag: &str) -> WorkerSpec {
    WorkerSpec::parse_flag(flag).unwrap()
}

#[test]
fn the_answer_of_a_reload_names_the_workers_that_differ() {
    let [one, two] = [1, 2].map(|id| spec(&format!("id={id},role=prefill,engine=vllm,url=http://a:{id}")));
    let two_otherwise = spec("id=2,role=decode,engine=vllm,url=http://a:2");
    let three = spec("id=3,role=prefill,engine=vllm,url=http://a:3");
    let changes = worker_changes(&[one.clone(), two], &[one.clone(), two_otherwise, three.clone()]);
    let expected = WorkerChanges { added: vec![WorkerId(3)], removed: vec![], changed: vec![WorkerId(2)] };
    assert_eq!(changes, expected);
    assert_eq!(worker_changes(&[one, three.clone()], &[three]).removed, [WorkerId(1)]);
}
