//! One rank of a world: checks every exchange against what it must give, and times sums.
//! `mpirun -n 2 cargo run -p cluster --example rank`

use std::error::Error;
use std::io::{Write, stdout};
use std::time::Instant;

use cluster::{LeaveReason, World};

/// Values of the timed sum: 50 MB.
const TIMED: usize = 12_500_000;

fn main() -> Result<(), Box<dyn Error>> {
    let Some(world) = World::join()? else {
        writeln!(stdout(), "alone")?;
        return Ok(());
    };
    let (rank, size) = (world.rank(), world.size());
    check_exchanges(&world)?;
    let values = vec![rank as f32; TIMED];
    world.barrier()?;
    let begun = Instant::now();
    let values = world.sum(values)?;
    let secs = begun.elapsed().as_secs_f64();
    let total = (size * (size - 1) / 2) as f32;
    assert!(values.iter().all(|value| *value == total));
    let library = world.library();
    writeln!(stdout(), "rank {rank} of {size} by {library}: 50 MB summed in {:.0} ms", secs * 1e3)?;
    world.leave(LeaveReason::Done)?;
    Ok(())
}

fn check_exchanges(world: &World) -> Result<(), Box<dyn Error>> {
    let (rank, size) = (world.rank(), world.size());
    let (number, count) = (i64::try_from(rank)?, i64::try_from(size)?);
    let large = i64::from(u32::MAX) << 8;
    let exact = world.sum(vec![number, large])?;
    assert_eq!(exact, [count * (count - 1) / 2, large * count]);
    let losses = world.sum(vec![0.5, rank as f64])?;
    assert_eq!(losses, [0.5 * size as f64, (size * (size - 1) / 2) as f64]);
    let halves = world.start_sum_bf16(vec![0.5; 3 << 20]).wait()?;
    assert!(halves.iter().all(|half| *half == 0.5 * size as f32));
    let mut first = world.start_sum_f64(vec![0.25]);
    world.barrier()?;
    assert_eq!(first.returned(), Some(&vec![0.25 * size as f32]));
    assert_eq!(first.wait()?, [0.25 * size as f32]);
    let largest = world.max(vec![number, -number])?;
    assert_eq!(largest, [count - 1, 0]);
    let bytes = world.broadcast(vec![rank as u8; 9 << 20], size - 1)?;
    assert!(bytes.iter().all(|byte| *byte == size as u8 - 1));
    let said = world.gather(format!("I am {}", "x".repeat(rank)).as_bytes())?;
    let expected: Vec<Vec<u8>> =
        (0..size).map(|rank| format!("I am {}", "x".repeat(rank)).into_bytes()).collect();
    assert_eq!(said, expected);
    Ok(())
}
