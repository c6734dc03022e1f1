"""Accounts in cents."""


class Account:
    def __init__(self, balance=0):
        self.balance = balance
        self.history = []

    def deposit(self, cents):
        if cents <= 0:
            raise ValueError("a deposit is above zero")
        self.balance += cents
        self.history.append(cents)

    def withdraw(self, cents):
        if cents > self.balance:
            raise ValueError("not that much there")
        self.balance -= cents
        self.history.append(-cents)


def transfer(source, target, cents):
    source.withdraw(cents)
    target.deposit(cents)
