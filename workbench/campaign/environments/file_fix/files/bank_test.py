from bank import Account, transfer


def refused(function, *arguments):
    try:
        function(*arguments)
    except ValueError:
        return True
    return False


def test_everything_may_be_withdrawn():
    account = Account(50)
    account.withdraw(50)
    assert account.balance == 0


def test_more_than_everything_is_refused():
    assert refused(Account(50).withdraw, 51)


def test_a_deposit_of_nothing_is_refused():
    assert refused(Account().deposit, 0)


def test_a_transfer_keeps_the_sum_and_the_history():
    one, other = Account(30), Account(5)
    transfer(one, other, 10)
    assert (one.balance, other.balance) == (20, 15)
    assert (one.history, other.history) == ([-10], [10])
