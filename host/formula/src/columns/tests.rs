use super::*;

const NUMBERS: [f32; 12] =
    [0.0, -0.0, 1.0, -1.0, 0.5, 3.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45, 1e30, -1e30];

const OPERATIONS: [Binary; 12] = [
    Binary::Add,
    Binary::Subtract,
    Binary::Multiply,
    Binary::Divide,
    Binary::Ratio,
    Binary::Min,
    Binary::Max,
    Binary::Less,
    Binary::LessOrEqual,
    Binary::Greater,
    Binary::GreaterOrEqual,
    Binary::Equal,
];

#[test]
fn every_result_is_finite_and_the_same_in_a_column() {
    for operation in OPERATIONS {
        for a in NUMBERS {
            for b in NUMBERS {
                let one = operation.one(a, b);
                assert!(one.is_finite(), "{a} {operation:?} {b} = {one}");
                let (mut right, mut left, mut column) = ([a; 17], [b; 17], [a; 17]);
                operation.column(&mut right, Other::Right(b));
                operation.column(&mut left, Other::Left(a));
                operation.column(&mut column, Other::Column(&[b; 17]));
                assert_eq!((right, left, column), ([one; 17], [one; 17], [one; 17]));
            }
        }
    }
    for operation in [Unary::Not, Unary::Negate, Unary::Exp, Unary::Log] {
        for a in NUMBERS {
            assert!(operation.one(a).is_finite(), "{operation:?} {a}");
            let mut column = [a; 5];
            operation.column(&mut column);
            assert_eq!(column, [operation.one(a); 5]);
        }
    }
}

#[test]
fn division_by_zero_and_overflow_are_as_documented() {
    assert_eq!([2.0, -2.0, 0.0].map(|a| Binary::Divide.one(a, 0.0)), [f32::MAX, f32::MIN, 0.0]);
    assert_eq!([2.0, -2.0].map(|a| Binary::Divide.one(a, -0.0)), [f32::MAX, f32::MIN]);
    assert_eq!([2.0, -2.0, 0.0].map(|a| Binary::Ratio.one(a, 0.0)), [0.0; 3]);
    assert_eq!(Binary::Ratio.one(1.0, 4.0), 0.25);
    assert_eq!(Binary::Multiply.one(f32::MAX, -2.0), f32::MIN);
    assert_eq!(
        (Unary::Exp.one(1e9), Unary::Log.one(0.0), Unary::Log.one(-1.0)),
        (f32::MAX, f32::MIN, f32::MIN)
    );
    assert_eq!(
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|x| single(x.to_bits())),
        [0.0, f32::MAX, f32::MIN]
    );
}

#[test]
fn folds_are_those_of_the_whole_column() {
    for length in 1_u8..70 {
        let values: Vec<f32> = (0..length).map(|row| f32::from(u16::from(row) * 37 % 61) - 20.0).collect();
        let sum: f32 = values.iter().sum();
        assert_eq!(Fold::Min.column(&values), values.iter().copied().fold(f32::MAX, f32::min));
        assert_eq!(Fold::Max.column(&values), values.iter().copied().fold(f32::MIN, f32::max));
        assert_eq!(Fold::Sum.column(&values), sum);
        assert_eq!(Fold::Mean.column(&values), (f64::from(sum) / f64::from(length)) as f32);
    }
    assert_eq!(Fold::Sum.column(&[f32::MAX; 3]), f32::MAX);
    assert_eq!(Fold::Mean.column(&[f32::MAX; 3]), f32::MAX);
    assert_eq!((Fold::Sum.one(2.0, 3), Fold::Mean.one(2.0, 3)), (6.0, 2.0));
}
